package table

import (
	"context"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// unreadTable is an outbox that `walpost migrate` made, that is not among the configured ones, and that no
// publication has.
type unreadTable struct {
	Name, SQL string
	Appends   bool // it is outbox_events
	Reads     bool // the role may read it, and the journal where it appends
	Live      int64
	Untouched bool // no row was ever updated or deleted, as far as the statistics go back
}

// UnreadFindings warns of outboxes that `walpost migrate` made, that have rows which no relay has ever
// delivered, and that neither the configuration names nor any publication has. A producer that inserts there
// waits for ever. Where the role may not read them, or does not trust their owner, the server's statistics
// have to do.
func (db *DB) UnreadFindings(ctx context.Context, tables []*outbox.Table) (f check.Findings, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		found, err := findUnread(ctx, conn, db.own.deadLetters, db.own.journal.Entries, tables)
		for _, u := range found {
			name := outbox.DefaultTable
			if u.Appends {
				name = outbox.AppendTable
			}
			if _, err := db.own.where.Find(ctx, conn, name); pg.IsUntrusted(err) {
				u.Reads = false
			} else if err != nil {
				return err
			}
			waits, err := u.waits(ctx, conn, db.own.journal.Entries)
			if err != nil {
				return err
			}
			if !waits {
				continue
			}
			advice := "name it in outboxes[].table"
			if u.Appends {
				advice += ", with layout: append and mark: journal"
			}
			f.Warning("table-unread", fmt.Sprintf("%s, and run `walpost migrate up`; or have the producers "+
				"insert into %s", advice, tables[0]),
				"table %s has rows that no relay has delivered: outboxes does not name it, and no "+
					"publication has it", u.Name)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("look for outboxes that no relay reads: %w", err)
	}
	return f, nil
}

// findUnread looks in the schema of walpost's other tables.
func findUnread(
	ctx context.Context, conn *pgx.Conn, dead, journal string, tables []*outbox.Table,
) ([]unreadTable, error) {
	rows, _ := conn.Query(ctx, `SELECT concat(n.nspname, '.', c.relname),
			format('%I.%I', n.nspname, c.relname), c.relname = $4,
			has_table_privilege(c.oid, 'SELECT')
				AND (c.relname <> $4 OR coalesce(has_table_privilege(to_regclass($2), 'SELECT'), false)),
			(SELECT sum(pg_stat_get_live_tuples(oid))::bigint FROM unnest(p.oids) oid),
			(SELECT sum(pg_stat_get_tuples_updated(oid) + pg_stat_get_tuples_deleted(oid)) = 0
				FROM unnest(p.oids) oid)
		FROM pg_class d JOIN pg_namespace n ON n.oid = d.relnamespace
		JOIN pg_class c ON c.relnamespace = n.oid AND c.relkind IN ('r', 'p'),
			LATERAL (SELECT array_agg(relid::oid) AS oids
				FROM (SELECT relid FROM pg_partition_tree(c.oid) UNION SELECT c.oid) r) p
		WHERE d.oid = to_regclass($1) AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid
				AND NOT a.attisdropped
				AND (c.relname, a.attname) IN (VALUES ($3::text, 'processed_at'), ($4::text, 'trace_id')))
			AND NOT EXISTS (SELECT FROM pg_publication_tables t JOIN pg_class m ON m.relname = t.tablename
				WHERE t.schemaname = n.nspname AND m.oid = ANY (p.oids))
		ORDER BY 1`, dead, journal, outbox.DefaultTable, outbox.AppendTable)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[unreadTable])
	return slices.DeleteFunc(found, func(u unreadTable) bool {
		return slices.ContainsFunc(tables, func(t *outbox.Table) bool { return t.Relation() == u.Name })
	}), err
}

// waits reports whether the table has rows that no relay has delivered.
func (u *unreadTable) waits(ctx context.Context, conn *pgx.Conn, journal string) (waits bool, err error) {
	switch {
	case !u.Reads:
		return u.Live > 0 && (u.Appends || u.Untouched), nil
	case u.Appends:
		err = conn.QueryRow(ctx, fmt.Sprintf(`SELECT EXISTS (SELECT FROM %s)
			AND NOT EXISTS (SELECT FROM %s WHERE outbox = $1)`, u.SQL, journal), u.Name).Scan(&waits)
	default:
		err = conn.QueryRow(ctx, fmt.Sprintf(
			`SELECT EXISTS (SELECT FROM %s WHERE processed_at IS NULL)`, u.SQL)).Scan(&waits)
	}
	return waits, err
}
