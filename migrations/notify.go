package migrations

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// notifyFunctionSQL makes the function, whose name may have its schema before it.
func notifyFunctionSQL(function string) string {
	return `CREATE OR REPLACE FUNCTION ` + function + `() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    NOTIFY ` + outbox.NotifyChannel + `;
    RETURN NULL;
END
$$`
}

func notifyTriggerSQL(table, function string) string {
	return fmt.Sprintf("CREATE OR REPLACE TRIGGER %s AFTER INSERT ON %s\n"+
		"    FOR EACH STATEMENT EXECUTE FUNCTION %s()",
		outbox.NotifyTrigger, table, function)
}

// NotifySQL is what [Runner.InstallNotify] does, as plain SQL. It fails where the function is there: somebody
// else may have made it.
func NotifySQL(schema string, outboxes []*outbox.Table) string {
	function := notifyFunction(schema)
	statements := []string{strings.Replace(notifyFunctionSQL(function), " OR REPLACE", "", 1) + ";\n"}
	for _, t := range outboxes {
		statements = append(statements, notifyTriggerSQL(t.SQL(), function)+";\n")
	}
	return strings.Join(statements, "\n")
}

// InstallNotify has every insert into the outboxes announced, for relays that poll: see
// [outbox.NotifyTrigger]. The function is made in the schema of walpost's tables. It returns the outboxes
// that did not have the trigger, or had it disabled, as far as it came; the others it does not touch. It
// tries for some twenty seconds to get a table's lock, and holds up its producers for half a second at a
// time.
func (r *Runner) InstallNotify(ctx context.Context) (done []string, err error) {
	err = r.withLock(ctx, func(conn *pgx.Conn, schema string) error {
		_, err := r.Own.Find(ctx, conn) // whether a superuser may do this here
		if err == nil {
			err = r.makeNotifyFunction(ctx, conn, schema)
		}
		if err != nil {
			return fmt.Errorf("create function %s: %w", outbox.NotifyTrigger, err)
		}
		for _, t := range r.outboxes {
			var there bool
			const find = `SELECT EXISTS (SELECT FROM pg_trigger
				WHERE tgrelid = to_regclass($1) AND tgname = $2 AND tgenabled IN ('O', 'A'))`
			err := conn.QueryRow(ctx, find, t.SQL(), outbox.NotifyTrigger).Scan(&there)
			if err != nil {
				return err
			}
			if there {
				continue
			}
			create := notifyTriggerSQL(t.SQL(), notifyFunction(schema))
			err = pg.PoliteOn(conn).Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
				if _, err := tx.Exec(ctx, create); err != nil {
					return err
				}
				return r.checkNotifyFunction(ctx, tx, schema)
			})
			if err != nil {
				return fmt.Errorf("create trigger on %s: %w", t, err)
			}
			done = append(done, t.String())
		}
		return nil
	})
	return done, explainNotify(err)
}

// notifyOwnerSQL is whose the function $2 in schema $1 is, whether that is a superuser, and whether the
// session makes it again: $3 is the role that the configuration names.
const notifyOwnerSQL = `SELECT o.rolname::text, o.rolsuper, o.rolname IN ($3, current_user)
	FROM pg_proc p JOIN pg_roles o ON o.oid = p.proowner JOIN pg_namespace n ON n.oid = p.pronamespace
	WHERE n.nspname = $1 AND p.proname = $2 AND p.pronargs = 0`

// makeNotifyFunction leaves a superuser's function as it is. It fails where the function is another role's:
// what that does would be done with the producers' privileges.
func (r *Runner) makeNotifyFunction(ctx context.Context, conn *pgx.Conn, schema string) error {
	return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
		sql := notifyFunctionSQL(notifyFunction(schema))
		var owner string
		var super, acts bool
		err := tx.QueryRow(ctx, notifyOwnerSQL, schema, outbox.NotifyTrigger, r.Own.Owner).
			Scan(&owner, &super, &acts)
		switch {
		case errors.Is(err, pgx.ErrNoRows): // it fails if somebody else makes it meanwhile
			sql = strings.Replace(sql, " OR REPLACE", "", 1)
		case err != nil:
			return err
		case super && !acts:
			return nil
		}
		if err == nil && !acts {
			return r.checkNotifyFunction(ctx, tx, schema)
		}
		b, err := newBeside(ctx, tx, schema, r.Own.Owner)
		if err != nil {
			return err
		}
		if _, err = tx.Exec(ctx, sql); err != nil {
			return err
		}
		if err := b.give(ctx, tx); err != nil {
			return err
		}
		return r.checkNotifyFunction(ctx, tx, schema)
	})
}

// checkNotifyFunction fails where the function is another role's.
func (r *Runner) checkNotifyFunction(ctx context.Context, tx pgx.Tx, schema string) error {
	var owner string
	var super, acts bool
	err := tx.QueryRow(ctx, notifyOwnerSQL, schema, outbox.NotifyTrigger, r.Own.Owner).
		Scan(&owner, &super, &acts)
	if err == nil && !super && !acts {
		err = hint.Errorf("run `walpost migrate` as that role; if walpost did not make it, drop it",
			"function %s belongs to role %q", notifyFunction(schema), owner)
	}
	return err
}

func notifyFunction(schema string) string {
	return outbox.QuoteIdent(schema) + "." + outbox.NotifyTrigger
}

// RemoveNotify takes back what InstallNotify did, also on tables that are not configured any more. It returns
// the tables that had the trigger, as far as it came. Its locks are those of InstallNotify, but readers wait
// too.
func (r *Runner) RemoveNotify(ctx context.Context) (done []string, err error) {
	conn, schema, err := r.connect(ctx)
	if err != nil {
		return nil, explain(err)
	}
	tables, exists, err := notified(ctx, conn, schema)
	if err != nil {
		return nil, explain(err)
	}
	if !exists {
		return nil, nil
	}
	err = r.withLock(ctx, func(conn *pgx.Conn, schema string) error {
		for _, t := range tables {
			drop := fmt.Sprintf("DROP TRIGGER IF EXISTS %s ON %s", outbox.NotifyTrigger, t)
			if err := pg.PoliteOn(conn).Exec(ctx, drop); err != nil {
				return fmt.Errorf("drop trigger on %s: %w", t, err)
			}
			done = append(done, t)
		}
		_, err := conn.Exec(ctx, "DROP FUNCTION IF EXISTS "+notifyFunction(schema)+"()")
		return err
	})
	return done, explainNotify(err)
}

// notified lists the tables that have the trigger, and reports whether its function exists.
func notified(
	ctx context.Context, conn *pgx.Conn, schema string,
) (tables []string, exists bool, err error) {
	rows, _ := conn.Query(ctx, `
		SELECT coalesce(quote_ident(n.nspname) || '.' || quote_ident(c.relname), '')
		FROM pg_proc p LEFT JOIN pg_trigger t ON t.tgfoid = p.oid AND t.tgname = $1 AND t.tgparentid = 0
			LEFT JOIN pg_class c ON c.oid = t.tgrelid LEFT JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = $2) AND p.proname = $1
		ORDER BY 1`, outbox.NotifyTrigger, schema)
	tables, err = pgx.CollectRows(rows, pgx.RowTo[string])
	exists = len(tables) > 0
	return slices.DeleteFunc(tables, func(t string) bool { return t == "" }), exists, err
}

func explainNotify(err error) error {
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		return hint.Wrap(err, "run `walpost migrate` as the owner of the outboxes, with CREATE on the schema")
	}
	if pg.Code(err) == pgerrcode.UndefinedTable {
		return hint.Wrap(err, "check outboxes[].table: `walpost migrate up` creates public.outbox_messages "+
			"in the canonical layout and no other outbox")
	}
	return explain(err)
}
