package migrations

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// beside gives to the owner of walpost's tables what another role makes beside them: otherwise the owner
// could neither migrate nor read on. It does so at the end of the transaction: until then nobody else can
// change it.
type beside struct {
	owner  string // "" where there is no other one
	schema string
	before []uint32 // the tables and functions that were there
}

// madeSQL lists the session's own tables and functions in a schema: others may make some meanwhile.
const madeSQL = `
	SELECT oid, CASE relkind WHEN 'v' THEN 'VIEW ' ELSE 'TABLE ' END || oid::regclass AS name
	FROM pg_class WHERE relnamespace = to_regnamespace(quote_ident($1)) AND relkind IN ('r', 'p', 'v')
		AND pg_get_userbyid(relowner) = current_user
	UNION ALL SELECT oid, 'FUNCTION ' || oid::regprocedure FROM pg_proc
	WHERE pronamespace = to_regnamespace(quote_ident($1)) AND pg_get_userbyid(proowner) = current_user`

// newBeside is called before anything is made. owner is the role that is to have it; "" is the present one.
// What another role may have made does not tell who is.
func newBeside(ctx context.Context, tx pgx.Tx, schema, owner string) (*beside, error) {
	b := &beside{schema: schema}
	if err := holdSchema(ctx, tx, schema); err != nil {
		return nil, err
	}
	err := tx.QueryRow(ctx, `SELECT coalesce((SELECT quote_ident(rolname) FROM pg_roles
			WHERE rolname = $2 AND rolname <> current_user AND `+pg.GivesToSQL("oid")+`), ''),
		ARRAY(SELECT oid FROM (`+madeSQL+`) x)`, schema, owner).Scan(&b.owner, &b.before)
	if err != nil {
		return nil, fmt.Errorf("read the owner of walpost's tables: %w", err)
	}
	return b, nil
}

// HoldSchemaSQL keeps the schema of that name until the transaction's end: its owner could rename it, and
// put another one in its place, of which a superuser's next statements would give tables away.
func HoldSchemaSQL(schema string) string {
	return "SELECT FROM pg_catalog.pg_namespace WHERE nspname = " + outbox.QuoteLiteral(schema) + " FOR SHARE"
}

// holdSchema does so where the session may: those who are no superusers trust the schema's owner.
func holdSchema(ctx context.Context, tx pgx.Tx, schema string) error {
	var super bool
	err := tx.QueryRow(ctx, `SELECT rolsuper FROM pg_roles WHERE rolname = current_user`).Scan(&super)
	if err == nil && super {
		_, err = tx.Exec(ctx, HoldSchemaSQL(schema))
	}
	if err != nil {
		return fmt.Errorf("hold schema %s: %w", schema, err)
	}
	return nil
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
