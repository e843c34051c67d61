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
