package migrations

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
)

// beside gives to the owner of walpost's tables what another role makes beside them: otherwise the owner
// could neither migrate nor read on. It does so at the end of the transaction: until then nobody else can
// change it.
type beside struct {
	owner  string // "" where there is no other one
	schema string
	before []uint32 // the tables and functions that were there
}

// madeSQL lists the tables and functions of a schema.
const madeSQL = `
	SELECT oid, CASE relkind WHEN 'v' THEN 'VIEW ' ELSE 'TABLE ' END || oid::regclass AS name
	FROM pg_class
	WHERE relnamespace = to_regnamespace(quote_ident($1)) AND relkind IN ('r', 'p', 'v')
	UNION ALL SELECT oid, 'FUNCTION ' || oid::regprocedure FROM pg_proc
	WHERE pronamespace = to_regnamespace(quote_ident($1))`

// newBeside is called before anything is made. owner is the role that is to have it; "" is the present one.
// What another role may have made does not tell who is.
func newBeside(ctx context.Context, tx pgx.Tx, schema, owner string) (*beside, error) {
	b := &beside{schema: schema}
	err := tx.QueryRow(ctx, `SELECT coalesce((SELECT quote_ident(rolname) FROM pg_roles
			WHERE rolname = $2 AND rolname <> current_user AND `+pg.GivesToSQL("oid")+`), ''),
		ARRAY(SELECT oid FROM (`+madeSQL+`) x)`, schema, owner).Scan(&b.owner, &b.before)
	if err != nil {
		return nil, fmt.Errorf("read the owner of walpost's tables: %w", err)
	}
	return b, nil
}

// give is called when all is made.
func (b *beside) give(ctx context.Context, tx pgx.Tx) error {
	if b.owner == "" {
		return nil
	}
	rows, _ := tx.Query(ctx, `SELECT name FROM (`+madeSQL+`) x WHERE NOT oid = ANY ($2)`, b.schema, b.before)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	for _, name := range names {
		if err == nil {
			_, err = tx.Exec(ctx, "ALTER "+name+" OWNER TO "+b.owner)
		}
	}
	if err != nil {
		return fmt.Errorf("give what was made to the owner of walpost's tables: %w", err)
	}
	return nil
}
