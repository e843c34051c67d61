package pg

import (
	"cmp"
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Own says where walpost's own tables are, and whose they may be.
type Own struct {
	// Schema is postgres.schema: the first outbox's by default, and public where there is none.
	Schema string
	// Owner is postgres.owner, a further role that is trusted, or "".
	Owner string
	// Schemas and Names are those of outboxes, whose owners are trusted.
	Schemas, Names []string
}

// OwnOf is where the tables of outboxes are. schema and owner are those of the configuration, or "".
func OwnOf(schema, owner string, outboxes []*outbox.Table) Own {
	o := Own{Schema: schema, Owner: owner}
	for _, t := range outboxes {
		o.Schema = cmp.Or(o.Schema, t.Schema)
		o.Schemas, o.Names = append(o.Schemas, t.Schema), append(o.Names, t.Name)
	}
	o.Schema = cmp.Or(o.Schema, "public")
	return o
}

// Named is a table's name in the schema, quoted.
func (o Own) Named(name string) string {
	return outbox.QuoteIdent(cmp.Or(o.Schema, "public")) + "." + outbox.QuoteIdent(name)
}

// OwnTable is one of walpost's own tables, as a session has found it.
type OwnTable struct {
	// SQL is its name with its schema, quoted. That of a table that counts as missing is a name that no table
	// has: PostgreSQL makes no schema whose name begins with pg_.
	SQL string
	// Untrusted is why something of that name is not used: "not a table", say. "" where it is, or where
	// there is nothing.
	Untrusted string
	// Trusted reports whether its owner is trusted. A superuser's session uses other tables, too.
	Trusted bool
}

// nowhere is a schema that does not exist.
const nowhere = "pg_missing"

// Find finds tables in the schema. A session uses ordinary and partitioned tables whose owner it trusts: its
// own role, superusers, the owners of the database, the schema and the outboxes, and the one that the
// configuration names. Code of the owner, such as a trigger's, runs as the session's role, and its rows are
// believed. Every other table counts as missing.
func (o Own) Find(ctx context.Context, conn *pgx.Conn, names ...string) ([]OwnTable, error) {
	rows, _ := conn.Query(ctx, `
		SELECT t.name, c.oid IS NOT NULL, coalesce(c.relkind IN ('r', 'p'), false),
			coalesce(pg_get_userbyid(c.relowner)::text, ''),
			coalesce(o.rolname = $3 OR `+TrustedSQL("c", "n", "o", "current_user", "$4", "$5")+`, false),
			(SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
		FROM unnest($2::text[]) WITH ORDINALITY t(name, ord)
			LEFT JOIN (pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid)
				ON n.nspname = $1 AND c.relname = t.name
			LEFT JOIN pg_roles o ON o.oid = c.relowner
		ORDER BY t.ord`, cmp.Or(o.Schema, "public"), names, o.Owner, o.Schemas, o.Names)
	var found []OwnTable
	var name, owner string
	var exists, isTable, trusted, super bool
	_, err := pgx.ForEachRow(rows, []any{&name, &exists, &isTable, &owner, &trusted, &super}, func() error {
		t := OwnTable{SQL: o.Named(name), Trusted: exists && isTable && trusted}
		switch {
		case exists && !isTable:
			t.Untrusted = "not a table"
		case exists && !trusted && !super:
			t.Untrusted = fmt.Sprintf("of role %q, which role %q does not trust",
				owner, conn.Config().User)
		}
		if !exists || t.Untrusted != "" {
			t.SQL = nowhere + "." + outbox.QuoteIdent(name)
		}
		found = append(found, t)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find walpost's tables: %w", err)
	}
	return found, nil
}

// TrustedSQL is the condition that a role trusts the owner r of a table c in a schema n, beside the one that
// the configuration names. schemas and names are arrays, of the outboxes.
func TrustedSQL(c, n, r, role, schemas, names string) string {
	return fmt.Sprintf(`(%[3]s.rolsuper OR %[3]s.rolname = %[4]s OR %[1]s.relowner IN (%[2]s.nspowner,
			(SELECT datdba FROM pg_database WHERE datname = current_database()))
		OR %[1]s.relowner IN (SELECT x.relowner FROM unnest(%[5]s::text[], %[6]s::text[]) b(schema, name)
			JOIN pg_namespace bn ON bn.nspname = b.schema
			JOIN pg_class x ON x.relnamespace = bn.oid AND x.relname = b.name))`,
		c, n, r, role, schemas, names)
}
