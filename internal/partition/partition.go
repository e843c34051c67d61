// Package partition creates, cuts, attaches, detaches and drops the partitions of tables that are partitioned
// by ranges of one column: of ids, or of times, by months.
//
// A new partition belongs to the table's owner. It has the storage parameters, the tablespace, the replica
// identity and the grants of the default partition, or of the last one.
package partition

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// By is the column's kind. Bounds are ids, or seconds since 1970, between math.MinInt64 and math.MaxInt64.
type By int

const (
	IDs By = iota
	Months
)

// bound writes a bound as ALTER TABLE takes it.
func (by By) bound(at int64) string {
	switch {
	case at == math.MinInt64:
		return "MINVALUE"
	case at == math.MaxInt64:
		return "MAXVALUE"
	case by == Months:
		return time.Unix(at, 0).UTC().Format("'2006-01-02 15:04:05+00'")
	}
	return fmt.Sprint(at)
}

// boundSQL reads the bound behind FROM or TO.
func (by By) boundSQL(word string) string {
	if by == IDs {
		return `(regexp_match(bound, '` + word + ` \(''(-?\d+)''\)'))[1]::bigint`
	}
	return `(SELECT CASE WHEN isfinite(at) THEN ceil(extract(epoch FROM at)) END
		FROM (SELECT (regexp_match(bound, '` + word + ` \(''(.*?)''\)'))[1]::timestamptz) t(at))::bigint`
}

// appendOnly are the parameters of partitions by ids: vacuum has nothing to do there but to freeze.
const appendOnly = ` WITH (autovacuum_vacuum_insert_threshold = -1,
	toast.autovacuum_vacuum_insert_threshold = -1)`

const (
	// mostMoved bounds the rows that are moved from the default partition into a new one, addStatement the
	// statements that create it: while it is attached, readers of the default partition wait.
	mostMoved    = 10_000
	addStatement = 5 * time.Second
	// validateLimit bounds the search of the last partition, where it has rows.
	validateLimit = 10 * time.Minute
)

// Table is a partitioned table, as it was found.
type Table struct {
	Schema, Name string
	SQL          string // quoted, with the schema
	Column       string
	By           By
	Owned        bool   // by this role: partitions can be created and dropped
	Default      string // the default partition, quoted, or ""
	Parts        []Part // the others, by their bounds
}

// Part is a partition with the values From <= v < To.
type Part struct {
	Name, SQL string // SQL is quoted, with the schema
	schema    string
	From, To  int64
	// What was found, if it was: somebody may have detached it since, and made another table of that name.
	oid   uint32
	bound string
	// checked: it has the constraint of a cut that did not come to its end.
	checked bool
}

func (t *Table) part(name string, from, to int64) Part {
	return Part{Name: name, From: from, To: to}.in(t.Schema)
}

// in is the partition in a schema.
func (p Part) in(schema string) Part {
	p.schema, p.SQL = schema, outbox.QuoteIdent(schema)+"."+outbox.QuoteIdent(p.Name)
	return p
}

// Part is the partition of ids that ends before to.
func (t *Table) Part(from, to int64) Part {
	return t.part(fmt.Sprintf("%s_%d", t.Name, to-1), from, to)
}

func (t *Table) String() string { return t.Schema + "." + t.Name }

// Overlaps reports whether a partition has values of another.
func (t *Table) Overlaps(p Part) bool {
	return slices.ContainsFunc(t.Parts, func(o Part) bool { return o.From < p.To && p.From < o.To })
}

// Read reads a table, which is quoted. It returns nil where that is not partitioned by ranges of the column.
func Read(ctx context.Context, conn *pgx.Conn, table, column string, by By) (*Table, error) {
	t := &Table{SQL: table, Column: column, By: by}
	err := conn.QueryRow(ctx, `
		SELECT n.nspname::text, c.relname::text, pg_has_role(c.relowner, 'USAGE'),
			coalesce(quote_ident(dn.nspname) || '.' || quote_ident(d.relname), '')
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			JOIN pg_partitioned_table pt ON pt.partrelid = c.oid
			LEFT JOIN pg_class d ON d.oid = pt.partdefid
			LEFT JOIN pg_namespace dn ON dn.oid = d.relnamespace
		WHERE c.oid = to_regclass($1) AND pg_get_partkeydef(c.oid) = format('RANGE (%I)', $2::text)`,
		table, column).Scan(&t.Schema, &t.Name, &t.Owned, &t.Default)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	rows, _ := conn.Query(ctx, `
		SELECT c.relname::text, format('%I.%I', n.nspname, c.relname), n.nspname::text,
			coalesce(`+by.boundSQL("FROM")+`, $2), coalesce(`+by.boundSQL("TO")+`, $3), c.oid, bound,
			EXISTS (SELECT FROM pg_constraint o
				WHERE o.conrelid = c.oid AND o.conname = $4 AND o.contype = 'c' AND o.coninhcount = 0)
		FROM pg_inherits i
			JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace,
			LATERAL pg_get_expr(c.relpartbound, c.oid) AS bound
		WHERE i.inhparent = to_regclass($1) AND bound <> 'DEFAULT' ORDER BY 4`,
		table, int64(math.MinInt64), int64(math.MaxInt64), Constraint)
	var p Part
	columns := []any{&p.Name, &p.SQL, &p.schema, &p.From, &p.To, &p.oid, &p.bound, &p.checked}
	_, err = pgx.ForEachRow(rows, columns, func() error {
		t.Parts = append(t.Parts, p)
		return nil
	})
	return t, err
}

// create makes a table that can become a partition. It has the owner of the partitioned table, and refuses
// TRUNCATE if that does; storage, tablespace, replica identity and grants are those of another partition, its
// model. A role that may create nothing in that tablespace uses the database's.
func (t *Table) create(ctx context.Context, tx pgx.Tx, name, model string) error {
	var storage, space, owner, identity string
	err := tx.QueryRow(ctx, `SELECT `+storageSQL+`, `+spaceSQL+`,
			quote_ident(pg_get_userbyid(p.relowner)),
			CASE m.relreplident WHEN 'f' THEN 'FULL' WHEN 'n' THEN 'NOTHING' ELSE 'DEFAULT' END
		FROM pg_class p, pg_class m WHERE p.oid = to_regclass($1) AND m.oid = to_regclass($2)`,
		t.SQL, model).Scan(&storage, &space, &owner, &identity)
	if err != nil {
		return err
	}
	rows, _ := tx.Query(ctx, refuseSQL, t.SQL, name)
	more, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err == nil {
		rows, _ = tx.Query(ctx, grantsSQL, model, name)
		var grants []string
		grants, err = pgx.CollectRows(rows, pgx.RowTo[string])
		more = append(more, grants...)
	}
	if err != nil {
		return err
	}
	if t.By == IDs {
		storage = cmp.Or(storage, appendOnly)
	}
	return execAll(ctx, tx, append([]string{
		fmt.Sprintf(`CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING IDENTITY)%s%s`,
			name, t.SQL, storage, space),
		fmt.Sprintf(`ALTER TABLE %s REPLICA IDENTITY %s`, name, identity),
		fmt.Sprintf(`ALTER TABLE %s OWNER TO %s`, name, owner),
	}, more...)...)
}

// spaceSQL is the tablespace of m, " TABLESPACE ...", or "".
const spaceSQL = `coalesce((SELECT ' TABLESPACE ' || quote_ident(spcname) FROM pg_tablespace s
	WHERE s.oid = m.reltablespace AND has_tablespace_privilege(s.oid, 'CREATE')), '')`

// refuseSQL gives the table $2 the triggers for TRUNCATE of $1: a partition takes over only those for rows.
// Each name and argument is quoted by itself: they are the owner's, and a superuser may run this.
const refuseSQL = `
	SELECT format('CREATE TRIGGER %I BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %I.%I(%s)',
			tgname, $2::text, n.nspname, f.proname, (
				SELECT string_agg(quote_literal(convert_from(decode(a, 'escape'), getdatabaseencoding())),
					', ' ORDER BY i)
				FROM unnest(string_to_array(encode(tgargs, 'escape'), '\000')) WITH ORDINALITY x(a, i)
				WHERE i <= tgnargs)) || CASE tgenabled
		WHEN 'A' THEN format('; ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', $2::text, tgname) ELSE '' END
	FROM pg_trigger g JOIN pg_proc f ON f.oid = tgfoid JOIN pg_namespace n ON n.oid = pronamespace
	WHERE tgrelid = to_regclass($1) AND NOT tgisinternal AND tgqual IS NULL
		AND tgtype & 34 = 34 AND tgenabled IN ('O', 'A')` // before, and TRUNCATE

// storageSQL is the storage parameters of m, " WITH (...)", or "" where it has none.
const storageSQL = `coalesce((SELECT format(' WITH (%s)', string_agg(
		concat(o.space, split_part(o.text, '=', 1), ' = ', quote_literal(split_part(o.text, '=', 2))),
		', '))
	FROM (
		SELECT '', unnest(m.reloptions)
		UNION ALL SELECT 'toast.', unnest(t.reloptions) FROM pg_class t WHERE t.oid = m.reltoastrelid
	) o(space, text) HAVING count(*) > 0), '')`

func (t *Table) attach(p Part) string {
	return fmt.Sprintf(`ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)`,
		t.SQL, p.SQL, t.By.bound(p.From), t.By.bound(p.To))
}

func (t *Table) detach(p Part) string {
	return fmt.Sprintf(`ALTER TABLE %s DETACH PARTITION %s`, t.SQL, p.SQL)
}

func (t *Table) lock() string { return `LOCK TABLE ` + t.SQL + ` IN ACCESS EXCLUSIVE MODE` }

func execAll(ctx context.Context, tx pgx.Tx, statements ...string) error {
	_, err := tx.Exec(ctx, strings.Join(statements, "; "))
	return err
}

// Constraint is the constraint that spares ATTACH PARTITION its search of a table's rows. It refuses rows of
// later partitions, until the table is one or that is given up.
const Constraint = "walpost_bounds"

// prove adds the constraint that every value in a table is within a partition. Its users go on. limit bounds
// the search of the rows; 0 is none. It reports whether the table has the constraint, also beside an error.
func (t *Table) prove(
	ctx context.Context, p pg.Polite, table string, within Part, limit time.Duration,
) (checked bool, err error) {
	column := outbox.QuoteIdent(t.Column)
	bounds := fmt.Sprintf(`%s IS NOT NULL AND %[1]s < %[2]s`, column, t.By.bound(within.To))
	if within.From != math.MinInt64 {
		bounds += fmt.Sprintf(` AND %s >= %s`, column, t.By.bound(within.From))
	}
	err = p.Exec(ctx, fmt.Sprintf(`%s; ALTER TABLE %s ADD CONSTRAINT %s CHECK (%s) NOT VALID`,
		uncheck(table), table, Constraint, bounds))
	if err != nil {
		return false, err
	}
	return true, p.Exec(ctx, fmt.Sprintf(`SET LOCAL statement_timeout = %d;
		ALTER TABLE %s VALIDATE CONSTRAINT %s`, limit.Milliseconds(), table, Constraint))
}

func uncheck(table string) string {
	return fmt.Sprintf(`ALTER TABLE %s DROP CONSTRAINT IF EXISTS %s`, table, Constraint)
}

// Add creates a partition, moves its rows into it from the default one, and attaches it, in one transaction.
// ATTACH PARTITION, unlike CREATE TABLE ... PARTITION OF, waits only for transactions that use the default
// partition. It fails with [ErrCrowded] where too many rows had to be moved.
func (t *Table) Add(ctx context.Context, begin pg.Begin, p Part) error {
	return begin(ctx, func(ctx context.Context, tx pgx.Tx) error {
		err := execAll(ctx, tx, fmt.Sprintf(`SET LOCAL statement_timeout = %d`, addStatement.Milliseconds()))
		if err == nil {
			err = t.create(ctx, tx, p.SQL, cmp.Or(t.Default, t.SQL))
		}
		if err == nil && t.Default != "" {
			err = t.fill(ctx, tx, p)
		}
		if err != nil {
			return err
		}
		return execAll(ctx, tx, t.attach(p), pg.ShowPath)
	})
}

// ErrCrowded means that the default partition has too many rows of a new one.
var ErrCrowded = errors.New("the default partition holds too many of them")

func (t *Table) fill(ctx context.Context, tx pgx.Tx, p Part) error {
	span := fmt.Sprintf(`%s >= %s AND %[1]s < %[3]s`,
		outbox.QuoteIdent(t.Column), t.By.bound(p.From), t.By.bound(p.To))
	var n int
	var columns string // by name: a table that was attached may have them in another order
	err := tx.QueryRow(ctx, fmt.Sprintf(`
		SELECT (SELECT count(*)::int FROM (SELECT FROM %s WHERE %s LIMIT %d) x),
			(SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
			WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = '')`,
		t.Default, span, mostMoved+1), p.SQL).Scan(&n, &columns)
	switch {
	case err != nil || n == 0:
		return err
	case n > mostMoved:
		return fmt.Errorf("%w: more than %d rows", ErrCrowded, mostMoved)
	}
	return execAll(ctx, tx, fmt.Sprintf(`
		WITH moved AS (
			DELETE FROM %s WHERE %s RETURNING *
		), here AS (
			INSERT INTO %s (%[4]s) SELECT %[4]s FROM moved RETURNING 1
		)
		SELECT count(*) FROM here WHERE %[5]s`, t.Default, span, p.SQL, columns, pg.OwnPath), pg.HidePath)
}

// ErrFilled means that rows have come into the last partition.
var ErrFilled = errors.New("rows came into the last partition")

// CutEmpty puts a partition before the last one, which is empty and goes to MAXVALUE.
func (t *Table) CutEmpty(ctx context.Context, p pg.Polite, last, next Part) error {
	return p.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		err := t.create(ctx, tx, next.SQL, last.SQL) // before others wait
		if err == nil {
			err = execAll(ctx, tx, t.lock())
		}
		var filled bool
		if err == nil {
			err = tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+last.SQL+`)`).Scan(&filled)
		}
		if err == nil && filled {
			err = ErrFilled
		}
		if err != nil {
			return err
		}
		rest := last
		rest.From, rest.To = next.To, math.MaxInt64
		return execAll(ctx, tx, t.detach(last), uncheck(last.SQL), t.attach(next), t.attach(rest))
	})
}

// CutFilled ends a partition at the end of next, whose name it gets, and puts an empty one behind it. Both
// are in its schema.
func (t *Table) CutFilled(ctx context.Context, p pg.Polite, part, next Part) error {
	next = next.in(part.schema)
	checked, err := t.prove(ctx, p, part.SQL, next, validateLimit)
	if err == nil {
		err = p.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			err := execAll(ctx, tx, t.lock(), t.detach(part),
				fmt.Sprintf(`ALTER TABLE %s RENAME TO %s`, part.SQL, outbox.QuoteIdent(next.Name)))
			rest := t.part(part.Name, next.To, part.To).in(part.schema)
			if err == nil {
				err = t.create(ctx, tx, rest.SQL, next.SQL)
			}
			if err != nil {
				return err
			}
			return execAll(ctx, tx, t.attach(next), uncheck(next.SQL), t.attach(rest))
		})
	}
	if err != nil && checked {
		err = errors.Join(err, t.removeConstraint(ctx, p, part.SQL))
	}
	return err
}

// removeConstraint takes the constraint away, for as long as it takes: it refuses rows. A reader may hold the
// table for longer than a lock is tried for.
func (t *Table) removeConstraint(ctx context.Context, p pg.Polite, table string) (err error) {
	p.Tries = 1
	for begun := time.Now(); ; {
		err = p.Exec(context.WithoutCancel(ctx), uncheck(table))
		if !pg.IsBlocked(err) || time.Since(begun) > validateLimit || !sleep.For(ctx, time.Second) {
			break
		}
	}
	if err != nil {
		err = hint.Errorf("end the sessions that hold the table, and then: "+uncheck(table),
			"rows may be refused by constraint %s of %s: %w", Constraint, table, err)
	}
	return err
}

// Uncheck takes the constraint away where a cut has left it behind, as one does whose process is killed.
func (t *Table) Uncheck(ctx context.Context, p pg.Polite) error {
	for _, part := range t.Parts {
		if !part.checked {
			continue
		}
		if err := t.removeConstraint(ctx, p, part.SQL); err != nil {
			return err
		}
	}
	return nil
}

// Drop drops a partition that may go, and that is one still. It asks behind a lock: of the whole table, which
// stops all its users, or of the partition, which stops its writers.
func (t *Table) Drop(
	ctx context.Context, p pg.Polite, part Part, whole bool, may func(context.Context, pgx.Tx) (bool, error),
) (dropped bool, err error) {
	lock := `LOCK TABLE ` + part.SQL + ` IN SHARE MODE`
	if whole {
		lock = t.lock()
	}
	err = p.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		err := execAll(ctx, tx, lock)
		if err == nil {
			err = tx.QueryRow(ctx, `SELECT EXISTS (
				SELECT FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
				WHERE c.oid = $1 AND c.oid = to_regclass($2) AND i.inhparent = to_regclass($3)
					AND NOT i.inhdetachpending AND pg_get_expr(c.relpartbound, c.oid) = $4)`,
				part.oid, part.SQL, t.SQL, part.bound).Scan(&dropped)
		}
		if err == nil && dropped {
			dropped, err = may(ctx, tx)
		}
		if err != nil || !dropped {
			return err
		}
		return execAll(ctx, tx, `DROP TABLE `+part.SQL)
	})
	return dropped && err == nil, err
}
