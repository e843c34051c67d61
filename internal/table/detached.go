package table

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Detached lists the tables that may be attached to an outbox as partitions, and by all that shows were some:
// they have columns of its names, but for those that no event needs and it may have got since, belong to its
// owner or to a superuser, draw no ids, and are no outboxes. Their rows have marks in the journal.
func (db *DB) Detached(ctx context.Context, t *outbox.Table) (names []string, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, `SELECT d.oid::regclass::text, n.nspname::text, c.relname::text
			FROM `+detachedSQL(t)+` d JOIN pg_class c ON c.oid = d.oid
				JOIN pg_namespace n ON n.oid = c.relnamespace ORDER BY d.oid`)
		own := db.own.where // whether a superuser may read them
		var sql, schema, name string
		_, err = pgx.ForEachRow(rows, []any{&sql, &schema, &name}, func() error {
			names = append(names, sql)
			own.Schemas, own.Names = append(own.Schemas, schema), append(own.Names, name)
			return nil
		})
		if err == nil && len(names) > 0 {
			_, err = own.Find(ctx, conn)
		}
		return err
	})
	if err != nil {
		err = fmt.Errorf("look for detached partitions of %s: %w", t, err)
	}
	return names, err
}

// detachedSQL are the OIDs of these tables, none for an outbox without partitions.
func detachedSQL(t *outbox.Table) string {
	const columns = `(SELECT array_agg(a.attname) FROM pg_attribute a
			WHERE a.attrelid = {of} AND a.attnum > 0 AND NOT a.attisdropped)`
	var needed []string
	for _, name := range t.Layout.Columns {
		if name != "" {
			needed = append(needed, outbox.QuoteLiteral(name))
		}
	}
	return journalSQL(t, `(SELECT c.oid FROM pg_class o JOIN pg_class c ON c.oid <> o.oid
	WHERE o.oid = to_regclass({regclass}) AND o.relkind = 'p' AND c.relkind IN ('r', 'p')
		AND (NOT c.relispartition
			OR EXISTS (SELECT FROM pg_inherits i WHERE i.inhrelid = c.oid AND i.inhdetachpending))
		AND (c.relowner = o.relowner OR (SELECT s.rolsuper FROM pg_roles s WHERE s.oid = c.relowner))
		AND NOT EXISTS (SELECT FROM {known} k WHERE k.table_oid = c.oid)
		AND EXISTS (SELECT FROM pg_attribute a
			WHERE a.attrelid = c.oid AND a.attname = {column} AND (a.attidentity = '' OR c.relispartition))
		AND {its columns} <@ {columns} AND NOT EXISTS (SELECT FROM pg_attribute n
			WHERE n.attrelid = o.oid AND n.attname = ANY ({needed}) AND NOT EXISTS (
				SELECT FROM pg_attribute a
				WHERE a.attrelid = c.oid AND a.attname = n.attname AND a.atttypid = n.atttypid)))`,
		"{regclass}", outbox.QuoteLiteral(t.SQL()),
		"{column}", outbox.QuoteLiteral(t.Layout.Columns[outbox.ID]),
		"{needed}", "ARRAY["+strings.Join(needed, ", ")+"]::text[]",
		"{its columns}", strings.ReplaceAll(columns, "{of}", "c.oid"),
		"{columns}", strings.ReplaceAll(columns, "{of}", "o.oid"))
}
