package pg

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Column is a column of a table.
type Column struct {
	Name      string
	Type      string // as the catalog names it, with its length
	Generated bool
}

// ReadColumns reads the columns of a table; none where it does not exist.
func ReadColumns(ctx context.Context, conn *pgx.Conn, t *outbox.Table) ([]Column, error) {
	rows, _ := conn.Query(ctx, `
		SELECT attname::text, format_type(atttypid, atttypmod), attgenerated <> ''
		FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped`, t.SQL())
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[Column])
	if err != nil {
		return nil, fmt.Errorf("read columns of %s: %w", t, err)
	}
	return columns, nil
}

// ForeignTypeSQL is the condition under which a type is not PostgreSQL's own, nor a domain over one.
func ForeignTypeSQL(oid string) string {
	return `EXISTS (WITH RECURSIVE base AS (SELECT ` + oid + ` AS oid UNION ALL
			SELECT t.typbasetype FROM base b JOIN pg_type t USING (oid) WHERE t.typtype = 'd')
		SELECT FROM base b JOIN pg_type t USING (oid)
		WHERE t.typtype <> 'd' AND t.typnamespace <> 'pg_catalog'::regnamespace)`
}

// FindTables finds walpost's own tables, and returns each one's name with its schema, quoted. They are looked
// for in a schema, which the configuration names, and then along the role's own search_path. A table that is
// in none of them gets the name that it would have in the first.
func FindTables(ctx context.Context, conn *pgx.Conn, schema string, names ...string) ([]string, error) {
	schemas := Schemas(conn.PgConn())
	if schema != "" {
		schemas = append([]string{schema}, schemas...)
	}
	if len(schemas) == 0 {
		schemas = []string{"public"}
	}
	rows, _ := conn.Query(ctx, `
		SELECT coalesce((SELECT s.name FROM unnest($2::text[]) WITH ORDINALITY s(name, n)
			JOIN pg_namespace ns ON ns.nspname = s.name
			JOIN pg_class c ON c.relnamespace = ns.oid AND c.relname = t.name AND c.relkind IN ('r', 'p')
			ORDER BY s.n LIMIT 1), ($2::text[])[1])
		FROM unnest($1::text[]) WITH ORDINALITY t(name, n) ORDER BY t.n`, names, schemas)
	found, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return nil, fmt.Errorf("find walpost's tables: %w", err)
	}
	for i, s := range found {
		found[i] = outbox.QuoteIdent(s) + "." + outbox.QuoteIdent(names[i])
	}
	return found, nil
}
