package table

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// WritableSchemas warns of schemas on the role's own search_path in which PUBLIC or another role may create
// objects. The owners of the schema and of the tables, superusers and the role itself do not count. No
// statement of walpost's looks there, but the functions of triggers do. While a table is missing its owner is
// not known, and only PUBLIC counts.
func (db *DB) WritableSchemas(ctx context.Context, tables []*outbox.Table) (f check.Findings, err error) {
	names := make([]string, len(tables))
	for i, t := range tables {
		names[i] = t.SQL()
	}
	var schema, who, list string
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, `SELECT n.nspname::text, quote_ident(n.nspname),
				string_agg(coalesce(quote_ident(r.rolname), 'PUBLIC'), ', ' ORDER BY r.rolname NULLS FIRST)
			FROM pg_namespace n, aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a
			LEFT JOIN pg_roles r ON r.oid = a.grantee
			WHERE n.nspname = ANY ($1::text[]::name[]) AND n.nspname <> 'pg_catalog'
				AND a.privilege_type = 'CREATE' AND a.grantee <> n.nspowner
				AND NOT coalesce(r.rolsuper OR r.rolname = current_user, false)
				AND (a.grantee = 0
					OR NOT EXISTS (SELECT FROM unnest($2::text[]) t WHERE to_regclass(t) IS NULL))
				AND NOT EXISTS (SELECT FROM pg_class c
					WHERE c.oid = ANY (ARRAY(SELECT to_regclass(t) FROM unnest($2::text[]) t))
						AND c.relowner = a.grantee)
			GROUP BY n.nspname ORDER BY 1`, pg.Schemas(conn.PgConn()), names)
		_, err := pgx.ForEachRow(rows, []any{&schema, &list, &who}, func() error {
			f.Warning("pg-schema-writable", fmt.Sprintf("REVOKE CREATE ON SCHEMA %s FROM %s", list, who),
				"schema %q is on the role's search_path, and %s may create objects in it: "+
					"the functions of triggers may find those", schema, who)
			return nil
		})
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read privileges on schemas: %w", err)
	}
	return f, nil
}
