package pg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
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

// nowhere is a schema that does not exist: PostgreSQL makes none whose name begins with pg_.
const nowhere = "pg_missing"

// Untrusted is the error where walpost would run code of a role that the session does not trust.
func Untrusted(fix, format string, args ...any) error {
	return hint.Coded("table-untrusted", hint.Errorf(fix, format, args...))
}

// IsUntrusted reports whether an error is that of [Untrusted].
func IsUntrusted(err error) bool { return hint.CodeOf(err) == "table-untrusted" }

// SuperSQL reports whether the session is a superuser's, or whether code in it could become one: of a member
// of such a role, or of one that may run programs or read and write files of the server, or that may make any
// role a member of these: up to PostgreSQL 15, CREATEROLE does. Code may give up the role that the session
// has taken on.
const SuperSQL = `(SELECT bool_or(r.rolsuper OR r.rolname IN
		('pg_execute_server_program', 'pg_read_server_files', 'pg_write_server_files')
		OR r.rolcreaterole AND current_setting('server_version_num')::int < 160000)
	FROM pg_roles r JOIN pg_roles s ON pg_has_role(s.oid, r.oid, 'MEMBER')
	WHERE s.rolname IN (current_user, session_user))`

// GivesToSQL is the condition that the session may give what it owns to a role, by its OID. Up to PostgreSQL
// 15 every member may.
func GivesToSQL(role string) string {
	return `(CASE WHEN current_setting('server_version_num')::int >= 160000
		THEN pg_has_role(` + role + `, 'SET') ELSE pg_has_role(` + role + `, 'MEMBER') END)`
}

// Find finds walpost's tables in the schema, and returns their names with it, quoted: for one that is
// missing, a name that no table has. It fails unless they are ordinary or partitioned tables of owners that
// the session trusts: code of the owner, such as a trigger's, runs as the session's role, and its rows are
// believed. A session trusts its own role, superusers, the owners of the database, the schema and the
// outboxes, and the one that the configuration names.
//
// A superuser's session trusts its own role, superusers and the one that the configuration names, and no
// other. It fails where the schema, or an outbox, whose code it would run, too, is another role's.
func (o Own) Find(ctx context.Context, conn *pgx.Conn, names ...string) (tables []string, err error) {
	schema := cmp.Or(o.Schema, "public")
	var super bool
	err = conn.QueryRow(ctx, `SELECT `+SuperSQL).Scan(&super)
	if err == nil && super {
		err = o.superTrusts(ctx, conn, names)
	}
	if err != nil {
		return nil, err
	}
	rows, _ := conn.Query(ctx, `
		SELECT t.name, c.oid IS NOT NULL, CASE WHEN c.relkind NOT IN ('r', 'p') THEN 'not a table'
			WHEN c.oid IS NOT NULL AND NOT (o.rolname = $3
				OR CASE WHEN $6 THEN o.rolsuper OR o.rolname = session_user ELSE `+
		TrustedSQL("c", "n", "o", "current_user", "$4", "$5")+` END)
			THEN format('of role "%s", which role "%s" does not trust', o.rolname, current_user)
			ELSE '' END
		FROM unnest($2::text[]) WITH ORDINALITY t(name, ord)
			LEFT JOIN (pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid)
				ON n.nspname = $1 AND c.relname = t.name
			LEFT JOIN pg_roles o ON o.oid = c.relowner
		ORDER BY t.ord`, schema, names, o.Owner, o.Schemas, o.Names, super)
	because := map[string][]string{} // tables, by why they are not used
	var name, why string
	var exists bool
	_, err = pgx.ForEachRow(rows, []any{&name, &exists, &why}, func() error {
		if why != "" {
			because[why] = append(because[why], name)
		}
		if exists {
			tables = append(tables, o.Named(name))
		} else {
			tables = append(tables, nowhere+"."+outbox.QuoteIdent(name))
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("find walpost's tables: %w", err)
	}
	var all []string
	for _, why := range slices.Sorted(maps.Keys(because)) {
		all = append(all, strings.Join(because[why], ", ")+": "+why)
	}
	if len(all) == 0 {
		return tables, nil
	}
	fix := "if walpost made it, name its owner in postgres.owner, or give it to the outboxes' owner"
	if super {
		fix = superFix
	}
	fix += "; else drop it, and run `walpost migrate up`"
	return nil, Untrusted(fix, "walpost's tables in schema %s: %s", schema, strings.Join(all, "; "))
}

const superFix = "use another role's URL in postgres.url, such as the owner's or the relay's; or name the " +
	"owner in postgres.owner, which trusts it with what a superuser may do"

// reachedSQL are the objects whose code may run when statements read or change tables, whose OIDs are in
// starts(oid), as far as dependencies are recorded: what the tables, their partitions, constraints, triggers,
// indexes and so on use, the tables that foreign keys lead to and come from, and all of it for these, too.
const reachedSQL = `reached(class, oid) AS (
		SELECT 'pg_class'::regclass::oid, oid FROM starts
		UNION SELECT e.class, e.oid FROM reached r CROSS JOIN LATERAL (
			SELECT d.refclassid AS class, d.refobjid AS oid FROM pg_depend d
			WHERE d.classid = r.class AND d.objid = r.oid AND d.refclassid <> 'pg_extension'::regclass
			UNION ALL
			SELECT d.classid, d.objid FROM pg_depend d
			WHERE d.refclassid = r.class AND d.refobjid = r.oid AND CASE
				WHEN r.class = 'pg_type'::regclass
				THEN d.classid = 'pg_constraint'::regclass
					OR d.classid = 'pg_class'::regclass AND d.deptype = 'i'
				WHEN r.class <> 'pg_class'::regclass THEN false
				WHEN d.classid = 'pg_rewrite'::regclass
				THEN EXISTS (SELECT FROM pg_rewrite w WHERE w.oid = d.objid AND w.ev_class = r.oid)
				ELSE d.classid IN ('pg_class'::regclass, 'pg_constraint'::regclass, 'pg_trigger'::regclass,
					'pg_attrdef'::regclass, 'pg_policy'::regclass, 'pg_statistic_ext'::regclass) END
		) e
	)`

// superTrusts fails where a superuser's session would run code of a role that is neither it nor a superuser,
// and that the configuration does not name. Such code belongs to what the tables lead to, or can be put
// there: by the owner of the schema or the database, by who may make triggers, foreign keys, or an outbox
// that is missing.
func (o Own) superTrusts(ctx context.Context, conn *pgx.Conn, names []string) error {
	var what, owner string
	err := conn.QueryRow(ctx, `
		WITH RECURSIVE named AS (
			SELECT b.schema, b.name, n.oid AS namespace, c.oid
			FROM unnest($2::text[], $3::text[]) b(schema, name)
				LEFT JOIN pg_namespace n ON n.nspname = b.schema
				LEFT JOIN pg_class c ON c.relnamespace = n.oid AND c.relname = b.name
		), own AS (
			SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname = $1 AND c.relname = ANY ($5)
		), starts AS (
			SELECT oid FROM named WHERE oid IS NOT NULL UNION SELECT oid FROM own
		), `+reachedSQL+`, tables AS (
			SELECT oid FROM reached WHERE class = 'pg_class'::regclass
		), database AS (
			SELECT oid, datname, datdba AS owner, coalesce(datacl, acldefault('d', datdba)) AS acl
			FROM pg_database WHERE datname = current_database()
		)
		SELECT w.what, coalesce(r.rolname::text, 'PUBLIC') FROM (
			SELECT 1, pg_describe_object(r.class, r.oid, 0) AS what, s.refobjid AS owner
			FROM reached r JOIN pg_shdepend s ON (s.classid, s.objid, s.deptype) = (r.class, r.oid, 'o')
				JOIN database d ON d.oid = s.dbid
			WHERE r.class <> 'pg_class'::regclass
				OR r.oid NOT IN (SELECT oid FROM own UNION ALL SELECT oid FROM pg_class WHERE relkind = 'S')
			UNION ALL SELECT 2, concat('schema ', nspname), nspowner FROM pg_namespace WHERE nspname = $1
			UNION ALL SELECT 3,
				concat('the right to make table ', m.schema, '.', m.name, ', which is missing,'), a.grantee
			FROM named m CROSS JOIN database d LEFT JOIN pg_namespace n ON n.oid = m.namespace
				CROSS JOIN aclexplode(CASE WHEN n.oid IS NULL THEN d.acl
					ELSE coalesce(n.nspacl, acldefault('n', n.nspowner)) END) a
			WHERE m.oid IS NULL AND a.privilege_type = 'CREATE'
			UNION ALL SELECT 4, concat('database ', datname), owner FROM database
			UNION ALL SELECT 5, concat('function ', evtfoid::regprocedure, ' of an event trigger'), p.proowner
			FROM pg_event_trigger JOIN pg_proc p ON p.oid = evtfoid
			UNION ALL SELECT 7, concat('the right ', a.privilege_type, ' on ', c.oid::regclass), a.grantee
			FROM pg_class c JOIN tables USING (oid), aclexplode(c.relacl) a
			WHERE a.privilege_type IN ('TRIGGER', 'REFERENCES')
			UNION ALL SELECT 7, concat('the right REFERENCES on ', attrelid::regclass), a.grantee
			FROM pg_attribute JOIN tables t ON t.oid = attrelid, aclexplode(attacl) a
			WHERE a.privilege_type = 'REFERENCES'
		) w (ord, what, owner) LEFT JOIN pg_roles r ON r.oid = CASE
			WHEN w.owner <> 0 AND pg_get_userbyid(w.owner) = 'pg_database_owner'
			THEN (SELECT owner FROM database) ELSE w.owner END
		WHERE (r.rolsuper OR r.rolname IN ($4, session_user)) IS NOT TRUE
		ORDER BY w.ord, w.what LIMIT 1`,
		cmp.Or(o.Schema, "public"), o.Schemas, o.Names, o.Owner, names).Scan(&what, &owner)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil
	case err != nil:
		return fmt.Errorf("find the owners of walpost's tables: %w", err)
	}
	return Untrusted(superFix,
		"%s belongs to role %q, and role %q is a superuser: code of the owner would run with its rights",
		what, owner, conn.Config().User)
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
