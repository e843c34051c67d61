package stream

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// PublicationSQL creates the publication as walpost needs it: inserts only, so
// that it never asks a table for a replica identity, and under the root's name
// where the table is partitioned.
func PublicationSQL(name string, tables []*outbox.Table) string {
	return fmt.Sprintf("CREATE PUBLICATION %s FOR TABLE %s "+
		"WITH (publish = 'insert', publish_via_partition_root = true)",
		outbox.QuoteIdent(name), strings.Join(members(tables), ", "))
}

// EnsurePublicationSQL is [EnsurePublication] as a script: it creates the publication, or adds the tables
// that an existing one lacks.
func EnsurePublicationSQL(name string, tables []*outbox.Table) string {
	var b strings.Builder
	fmt.Fprintf(&b, `DO $walpost$
BEGIN
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF NOT EXISTS (SELECT FROM pg_publication WHERE pubname = %[1]s) THEN
        %[2]s;
    ELSIF NOT (SELECT pubinsert FROM pg_publication WHERE pubname = %[1]s) THEN
        RAISE EXCEPTION 'publication %% does not publish inserts', %[1]s USING HINT = %[3]s;
    END IF;
`, pg.QuoteLiteral(name), PublicationSQL(name, tables), pg.QuoteLiteral(publishInserts(name)))
	for _, t := range tables {
		fmt.Fprintf(&b, `    IF NOT EXISTS (SELECT FROM pg_publication_tables
            WHERE (pubname, schemaname, tablename) = (%s, %s, %s)) THEN
        %s;
    END IF;
`, pg.QuoteLiteral(name), pg.QuoteLiteral(t.Schema), pg.QuoteLiteral(t.Name),
			addTablesSQL(name, []*outbox.Table{t}))
	}
	return b.String() + "END\n$walpost$"
}

func publishInserts(name string) string {
	return fmt.Sprintf("ALTER PUBLICATION %s SET (publish = 'insert')", outbox.QuoteIdent(name))
}

// ErrNoPublication means that the publication does not exist.
var ErrNoPublication = errors.New("publication does not exist")

// CheckPublication reports what is wrong with an existing publication. It
// returns ErrNoPublication where it does not exist, and changes nothing.
func CheckPublication(ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table) error {
	problems, err := PublicationProblems(ctx, conn, name, tables)
	if err != nil {
		return err
	}
	return problems.FirstError()
}

// PublicationProblems are all that [CheckPublication] reports the first of.
func PublicationProblems(
	ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table,
) (check.Findings, error) {
	missing, problems, err := missingTables(ctx, conn, name, tables)
	if err == nil && len(missing) > 0 {
		problems.If(true, "publication-tables", hint.Errorf(
			"run `walpost migrate up` as the tables' owner, or: "+addTablesSQL(name, missing),
			"publication %q does not publish %s", name, missing[0]))
	}
	return problems, err
}

// OtherTables warns of tables whose rows the server sends to the relay, which drops them.
func OtherTables(
	ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table,
) (f check.Findings, err error) {
	names := make([]string, len(tables))
	for i, t := range tables {
		names[i] = t.SQL()
	}
	var others []string
	// By names: to look a table up takes USAGE on its schema.
	err = conn.QueryRow(ctx, `SELECT coalesce(array_agg(schemaname || '.' || tablename ORDER BY 1), '{}')
		FROM pg_publication_tables
		WHERE pubname = $1 AND format('"%s"."%s"', replace(schemaname, '"', '""'),
			replace(tablename, '"', '""')) <> ALL ($2::text[])`,
		name, names).Scan(&others)
	if err != nil {
		return nil, fmt.Errorf("read publication %q: %w", name, err)
	}
	if len(others) > 0 {
		const most = 5
		list := strings.Join(others[:min(most, len(others))], ", ")
		if more := len(others) - most; more > 0 {
			list += fmt.Sprintf(" and %d more", more)
		}
		f.Warning("publication-other-tables",
			"name the outboxes among them in outboxes[].table; take the others out of the publication, or "+
				"give the relay a publication of its own: postgres.publication and `walpost migrate up`",
			"publication %q has tables that outboxes does not name (%s): "+
				"the relay gets their rows and delivers none of them", name, list)
	}
	return f, nil
}

// EnsurePublication creates the publication, or adds the tables that it lacks. It never drops anything. One
// that a superuser creates is given to the tables' owner, who is to add others. It returns what it ran,
// or "".
func EnsurePublication(
	ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table,
) (string, error) {
	sql, err := PlanPublication(ctx, conn, name, tables)
	if err != nil || sql == "" {
		return "", err
	}
	if sql == PublicationSQL(name, tables) {
		owner, err := ownerSQL(ctx, conn, name, tables)
		if err != nil {
			return "", err
		}
		sql += owner
	}
	if _, err := conn.Exec(ctx, sql); err != nil {
		if pg.Code(err) == pgerrcode.DuplicateObject { // somebody else was faster
			return "", CheckPublication(ctx, conn, name, tables)
		}
		return "", hint.Wrap(fmt.Errorf("create publication %q: %w", name, err),
			"it needs the tables' owner with CREATE on the database: "+
				"run `walpost migrate up` as such a role, or: "+sql)
	}
	return sql, nil
}

// PlanPublication is the statement that [EnsurePublication] would run, or "".
func PlanPublication(
	ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table,
) (string, error) {
	missing, problems, err := missingTables(ctx, conn, name, tables)
	if err == nil {
		err = problems.FirstError()
	}
	switch {
	case errors.Is(err, ErrNoPublication):
		return PublicationSQL(name, tables), mayFilter(conn, tables)
	case err != nil, len(missing) == 0:
		return "", err
	}
	return addTablesSQL(name, missing), nil
}

// ownerSQL gives a publication to the one owner of its tables, where the session's role is another and may
// do so. Else it is "".
func ownerSQL(ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table) (string, error) {
	names := make([]string, len(tables))
	for i, t := range tables {
		names[i] = t.SQL()
	}
	var owner string
	err := conn.QueryRow(ctx, `SELECT coalesce(max(quote_ident(rolname)), '') FROM (
			SELECT DISTINCT relowner FROM pg_class
			WHERE oid IN (SELECT to_regclass(t) FROM unnest($1::text[]) t)
		) c JOIN pg_roles o ON o.oid = relowner
		HAVING count(*) = 1 AND NOT bool_or(rolsuper OR rolname = current_user)
			AND ((SELECT rolsuper FROM pg_roles WHERE rolname = current_user)
				OR bool_and(`+pg.GivesToSQL("relowner")+`
					AND has_database_privilege(relowner, current_database(), 'CREATE')))`, names).Scan(&owner)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return "", nil
	case err != nil:
		return "", fmt.Errorf("read the owner of %s: %w", strings.Join(names, ", "), err)
	}
	return fmt.Sprintf("; ALTER PUBLICATION %s OWNER TO %s", outbox.QuoteIdent(name), owner), nil
}

// mayFilter reports an error where some of a table's rows are asked of a server that cannot filter them.
func mayFilter(conn *pgx.Conn, tables []*outbox.Table) error {
	for _, t := range tables {
		if t.FilterSQL("") == "" || serverVersion(conn.PgConn()) >= 15 {
			continue
		}
		advice, what := "leave shard out, or upgrade to 15 or newer", "shard "+t.Shard.String()
		if t.Where != "" {
			advice, what = "set mode: poll, leave where out, or upgrade to 15 or newer", "where"
		}
		return hint.Coded("publication-no-filters", hint.Errorf(advice,
			"%s: publications filter no rows before PostgreSQL 15", what))
	}
	return nil
}

func addTablesSQL(name string, tables []*outbox.Table) string {
	return fmt.Sprintf("ALTER PUBLICATION %s ADD TABLE %s",
		outbox.QuoteIdent(name), strings.Join(members(tables), ", "))
}

// members are the tables as a publication names them, with their filters.
func members(tables []*outbox.Table) []string {
	out := make([]string, len(tables))
	for i, t := range tables {
		out[i] = t.SQL()
		if filter := t.FilterSQL(""); filter != "" {
			out[i] += " WHERE (" + filter + ")"
		}
	}
	return out
}

// isFilter reports whether a publication filters the rows of a table as it should. A condition of the
// configuration is compared in the server's words.
func isFilter(ctx context.Context, conn *pgx.Conn, t *outbox.Table, filter string) (bool, error) {
	want := t.FilterSQL("")
	if t.Where != "" {
		// The planner would run others' code in a superuser's session. The relay compares, too.
		_, err := pg.OwnOf(t.Schema, "", []*outbox.Table{t}).Find(ctx, conn)
		if pg.IsUntrusted(err) {
			return true, nil
		}
		if err != nil {
			return false, err
		}
		for _, condition := range []*string{&want, &filter} {
			read, err := pg.ReadCondition(ctx, conn, t.SQL(), *condition)
			if err != nil {
				return false, fmt.Errorf("condition %q of %s: %w", *condition, t, err)
			}
			*condition = read
		}
		return filter == want, nil
	}
	return sameFilter(filter, want), nil
}

// sameFilter compares a condition of ours with the server's wording of one, which adds
// casts and parentheses.
func sameFilter(a, b string) bool { return plainFilter(a) == plainFilter(b) }

var casts = regexp.MustCompile(`::[a-z]+|[()\s"]`)

func plainFilter(s string) string { return casts.ReplaceAllString(strings.ToLower(s), "") }

// missingTables are those that the publication lacks, and what else is wrong with it.
func missingTables(
	ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table,
) (missing []*outbox.Table, p check.Findings, err error) {
	var inserts, viaRoot bool
	err = conn.QueryRow(ctx, `SELECT pubinsert, pubviaroot FROM pg_publication WHERE pubname = $1`, name).
		Scan(&inserts, &viaRoot)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil, fmt.Errorf("publication %q: %w", name, ErrNoPublication)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read publication %q: %w", name, err)
	}
	p.If(!inserts, "publication-inserts", hint.Errorf(publishInserts(name),
		"publication %q does not publish inserts", name))
	if err := mayFilter(conn, tables); err != nil {
		p.Failed(check.Error, "publication-no-filters", err)
		return nil, p, nil
	}
	for _, t := range tables {
		published, wrong, err := checkMember(ctx, conn, name, t, viaRoot)
		if err != nil {
			return nil, nil, err
		}
		p = append(p, wrong...)
		if !published && len(wrong) == 0 {
			missing = append(missing, t)
		}
	}
	return missing, p, nil
}

// checkMember reports whether the publication has the table, and whether it has it
// in a way that would hide rows or columns.
func checkMember(
	ctx context.Context, conn *pgx.Conn, name string, t *outbox.Table, viaRoot bool,
) (published bool, p check.Findings, err error) {
	// Row filters and column lists came with 15; to_jsonb hides their absence. A generated column is in no
	// list before 18, and is the table's problem, as is one that it lacks.
	var filter *string
	var left []string // out
	err = conn.QueryRow(ctx, `SELECT to_jsonb(p) ->> 'rowfilter', ARRAY(SELECT attname::text FROM pg_attribute
			WHERE attrelid = to_regclass($4) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''
			AND NOT nullif(to_jsonb(p) -> 'attnames', 'null') ? attname::text)
		FROM pg_publication_tables p WHERE pubname = $1 AND schemaname = $2 AND tablename = $3`,
		name, t.Schema, t.Name, t.SQL()).Scan(&filter, &left)
	if errors.Is(err, pgx.ErrNoRows) {
		// A partitioned table that is published by its leaves' names is listed by them.
		p, err = absenceProblem(ctx, conn, name, t, viaRoot)
		return false, p, err
	}
	if err != nil {
		return false, nil, fmt.Errorf("read publication %q: %w", name, err)
	}
	recreate := fmt.Sprintf("BEGIN; ALTER PUBLICATION %[1]s DROP TABLE %[2]s; %[3]s; COMMIT",
		outbox.QuoteIdent(name), t.SQL(), addTablesSQL(name, []*outbox.Table{t}))
	apart := "give each shard a slot, a publication and a stream of its own, " +
		"or, while nothing is pending and the slot has nothing left to bring: " + recreate
	what := "shard " + t.Shard.String()
	if t.Shard.All() {
		apart, what = recreate, "where: "+t.Where
	}
	switch want := t.FilterSQL(""); {
	case want == "" && filter != nil:
		p.If(true, "publication-filter", hint.Errorf(recreate,
			"publication %q filters the rows of %s: %s", name, t, *filter))
	case want != "" && filter == nil:
		p.If(true, "publication-filter", hint.Errorf(apart,
			"publication %q publishes all rows of %s, not those of %s", name, t, what))
	case want != "":
		same, err := isFilter(ctx, conn, t, *filter)
		if err != nil {
			return false, nil, err
		}
		p.If(!same, "publication-filter", hint.Errorf(apart,
			"publication %q publishes other rows of %s than those of %s: %s", name, t, what, *filter))
	}
	for f := outbox.ID; f < outbox.NumFields; f++ {
		p.If(t.Layout.Has(f) && slices.Contains(left, t.Layout.Columns[f]), "publication-columns",
			hint.Errorf(recreate, "publication %q leaves out column %q of %s", name, t.Layout.Columns[f], t))
	}
	return true, p, nil
}

// absenceProblem is why adding the table to the publication would not have it listed.
func absenceProblem(
	ctx context.Context, conn *pgx.Conn, name string, t *outbox.Table, viaRoot bool,
) (p check.Findings, err error) {
	var missing, leaf bool
	// Where it is not asked for, no name of another table is looked up, which takes USAGE on its schema.
	err = conn.QueryRow(ctx, `SELECT to_regclass($2) IS NULL, NOT $3 AND EXISTS (
			SELECT FROM pg_publication_tables p JOIN pg_partition_tree(to_regclass($2)) t
			ON t.relid = to_regclass(format('%I.%I', p.schemaname, p.tablename)) WHERE p.pubname = $1)`,
		name, t.SQL(), viaRoot).Scan(&missing, &leaf)
	if err != nil {
		return nil, fmt.Errorf("read publication %q: %w", name, err)
	}
	p.If(missing, "table-missing", hint.Errorf("create the table, or check outboxes[].table",
		"table %s does not exist", t))
	p.If(leaf, "publication-partitions", hint.Errorf(
		fmt.Sprintf("ALTER PUBLICATION %s SET (publish_via_partition_root = true)", outbox.QuoteIdent(name)),
		"publication %q publishes the partitions of %s under their own names", name, t))
	return p, nil
}

// MayCreatePublication reports why this role could not create the publication.
// It changes nothing.
func MayCreatePublication(ctx context.Context, conn *pgx.Conn, name string, tables []*outbox.Table) error {
	for _, t := range tables {
		var may bool
		err := conn.QueryRow(ctx, `SELECT has_database_privilege(current_database(), 'CREATE')
				AND pg_has_role(relowner, 'USAGE')
			FROM pg_class WHERE oid = to_regclass($1)`, t.SQL()).Scan(&may)
		if err != nil {
			return fmt.Errorf("check privileges on %s: %w", t, err)
		}
		if !may {
			return hint.Coded("publication-missing", hint.Errorf(
				"run `walpost migrate up` as the table's owner with CREATE on the database, or: "+
					PublicationSQL(name, tables),
				"publication %q does not exist, and this role may not create it", name))
		}
	}
	return nil
}
