package table

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// What is here looks at a relay's work from outside: it takes no lock of the relay's, changes nothing,
// and works on a standby, too.

// OpenLook connects what looks at a relay's work from outside.
func OpenLook(ctx context.Context, cfg Config) (*DB, error) {
	if err := CheckDirect(ctx, cfg); err != nil {
		return nil, err
	}
	db, err := Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := db.Unbind(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

// OpenConsole connects as OpenLook does. A statement takes the limit at most, and a change lasts once it is
// committed.
func OpenConsole(ctx context.Context, cfg Config, limit time.Duration) (*DB, error) {
	db, err := OpenLook(ctx, cfg)
	if err != nil {
		return nil, err
	}
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, fmt.Sprintf(`RESET synchronous_commit; SET statement_timeout = %d`,
			limit.Milliseconds()))
		return err
	})
	if err != nil {
		db.Close()
		return nil, fmt.Errorf("prepare session: %w", err)
	}
	return db, nil
}

// RecordedCount counts the rows in which a failure is recorded, parked and held together up to a
// limit. The layout has columns for that.
func (db *DB) RecordedCount(ctx context.Context, t *outbox.Table, limit int) (parked, held int, err error) {
	err = db.QueryRow(ctx, []any{&parked, &held}, fmt.Sprintf(
		`SELECT count(*) FILTER (WHERE NOT held)::int, count(*) FILTER (WHERE held)::int
		FROM (SELECT %s AS held FROM %s t WHERE %s LIMIT %d) r`,
		heldIs(t, "t"), sourceOf(t).pending, recordedSQL(t), limit))
	if err != nil {
		return 0, 0, fmt.Errorf("count recorded rows of %s: %w", t, err)
	}
	return parked, held, nil
}

// ExplainRead adds to the error of a count what helps: of an outbox, or of the dead letters where t
// is nil.
func (db *DB) ExplainRead(ctx context.Context, t *outbox.Table, err error) error {
	user := db.User()
	switch pg.Code(err) {
	case pgerrcode.LockNotAvailable:
		return err // pg.DB has the hint
	case pgerrcode.QueryCanceled:
		return hint.Wrap(err, "it would have taken too long: "+
			"the indexes that `walpost migrate print` has on the canonical table make it quick")
	}
	if t == nil {
		return ExplainLetters(err,
			fmt.Sprintf("GRANT SELECT ON %s TO %s", DeadLetters, outbox.QuoteIdent(user)))
	}
	switch pg.Code(err) {
	case pgerrcode.UndefinedTable:
		advice := "name the table in outboxes[].table"
		_ = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			advice = adviseMissing(ctx, conn, t)
			return nil
		})
		return hint.Wrap(err, advice)
	case pgerrcode.UndefinedColumn:
		return hint.Wrap(err, "say in outboxes[].layout what the table calls its columns")
	case pgerrcode.InsufficientPrivilege:
		return hint.Wrap(err, db.adviseGrant(ctx, t, outbox.QuoteIdent(user)))
	}
	return err
}

// adviseGrant asks the catalog, which everybody may read, what keeps the role from reading a table.
func (db *DB) adviseGrant(ctx context.Context, t *outbox.Table, role string) string {
	var reaches, hidden bool
	err := db.QueryRow(ctx, []any{&reaches, &hidden}, `SELECT has_schema_privilege(n.oid, 'USAGE'),
			row_security_active(c.oid) AND has_table_privilege(c.oid, 'SELECT')
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE n.nspname = $1 AND c.relname = $2`, t.Schema, t.Name)
	if err == nil && hidden {
		return fmt.Sprintf("row-level security would hide rows: "+
			"ALTER ROLE %s BYPASSRLS, or make it the table's owner", role)
	}
	grants := fmt.Sprintf("GRANT SELECT ON %s TO %s", t.SQL(), role)
	if err == nil && !reaches {
		grants = fmt.Sprintf("GRANT USAGE ON SCHEMA %s TO %s; ", outbox.QuoteIdent(t.Schema), role) + grants
	}
	return "as the table's owner: " + grants
}
