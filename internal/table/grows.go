package table

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// Ages says which of retention's ages are on, and whether only others than the relay make its passes.
type Ages struct{ Archive, Delete, ByOthers bool }

// GrowthFindings say where delivered rows stay for ever: nothing is to take them away, or the role may not
// drop the partitions that they are in.
func (db *DB) GrowthFindings(ctx context.Context, t *outbox.Table, ages Ages) (f check.Findings, err error) {
	leaves := ages.Delete || ages.Archive && IsArchived(t)
	if !MarkOf(t).Stays() {
		return nil, nil
	}
	if !leaves {
		key, than := "retention.delete_after", "2160h (90 days)"
		if IsArchived(t) {
			key, than = "retention.archive_after", "168h (7 days)"
		}
		f.Note("table-grows", fmt.Sprintf("set %s, such as to %s, unless you need the rows", key, than),
			"delivered rows of %s stay for ever: %s is 0s", t, key)
		return f, nil
	}
	var stuck bool
	err = db.QueryRow(ctx, []any{&stuck}, `SELECT relkind = 'p' AND NOT pg_has_role(relowner, 'USAGE')
		FROM pg_class WHERE oid = to_regclass($1)`, t.SQL())
	if err != nil {
		return nil, fmt.Errorf("read the owner of %s: %w", t, err)
	}
	if stuck && Journals(t) && !ages.ByOthers {
		f.Failed(check.Warn, "table-grows", hint.Errorf(
			"run `walpost retention` with the owner's postgres.url each hour, and set retention.interval: 0s",
			"delivered rows of %s stay: only the owner of a partitioned table drops its partitions", t))
	}
	return f, nil
}

// OwnerFindings name partitions of an outbox and of the archive that belong to another role than their table:
// whoever owns that can neither drop nor cut them.
func (db *DB) OwnerFindings(ctx context.Context, t *outbox.Table) (f check.Findings, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, `
			SELECT c.oid::regclass::text, pg_get_userbyid(c.relowner)::text,
				p.oid::regclass::text, pg_get_userbyid(p.relowner)::text,
				quote_ident(pg_get_userbyid(p.relowner))
			FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_class p ON p.oid = i.inhparent
			WHERE p.oid IN (to_regclass($1), to_regclass($2)) AND c.relowner <> p.relowner ORDER BY 1`,
			t.SQL(), db.own.archive)
		var name, has, of, owner, quoted string
		_, err := pgx.ForEachRow(rows, []any{&name, &has, &of, &owner, &quoted}, func() error {
			f.Warning("table-owner",
				fmt.Sprintf("as %s or a superuser: ALTER TABLE %s OWNER TO %s", has, name, quoted),
				"partition %s belongs to %s, and %s to %s, which can neither drop nor cut it",
				name, has, of, owner)
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read the owners of partitions: %w", err)
	}
	return f, nil
}
