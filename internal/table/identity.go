package table

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// identityFacts are whether the server lets rows be changed: it refuses that where a publication, be it of
// another program, publishes changes of the table, and the table has no replica identity.
type identityFacts struct {
	refused error
	without []string // the table, or its partitions, that have none, quoted
}

// read has the server plan what a mark and a dead letter do: it refuses then what it would refuse later. The
// plans wait for a lock of the table for a moment at most; what they cannot tell then is asked again.
func (f *identityFacts) read(ctx context.Context, conn *pgx.Conn, t *outbox.Table) error {
	var published bool
	var without []string
	err := conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_publication WHERE pubupdate OR pubdelete),
			coalesce(array_agg(format('%I.%I', n.nspname, c.relname)), '{}')
		FROM (SELECT to_regclass($1)::oid UNION SELECT relid FROM pg_partition_tree(to_regclass($1))) r(id)
		JOIN pg_class c ON c.oid = r.id JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind = 'r' AND c.relreplident <> 'f'
			AND NOT EXISTS (SELECT FROM pg_index i WHERE i.indrelid = c.oid AND i.indisvalid
				AND CASE c.relreplident WHEN 'd' THEN i.indisprimary WHEN 'i' THEN i.indisreplident END)`,
		t.SQL()).Scan(&published, &without)
	if err != nil {
		return fmt.Errorf("read the replica identity of %s: %w", t, err)
	}
	if !published {
		return nil
	}
	plans := []string{"SET LOCAL lock_timeout = 50"}
	if Keeps(t) || len(Writes(t)) > 0 {
		plans = append(plans, fmt.Sprintf("EXPLAIN UPDATE %s SET %[2]s = %[2]s WHERE tableoid = 0",
			t.SQL(), outbox.QuoteIdent(UpdateColumns(t)[0])))
	}
	if Deletes(t) {
		plans = append(plans, fmt.Sprintf("EXPLAIN DELETE FROM %s WHERE tableoid = 0", t.SQL()))
	}
	_, err = conn.PgConn().Exec(ctx, strings.Join(plans, ";")).ReadAll()
	switch {
	case lacksIdentity(err):
		f.refused, f.without = err, without
	case pg.Code(err) == "":
		return err
	}
	return nil // what else is wrong is told by other checks
}

// lacksIdentity reports whether the server lets no row of a table be changed because of a publication.
func lacksIdentity(err error) bool {
	code := pg.Code(err)
	return code == pgerrcode.ObjectNotInPrerequisiteState || code == pgerrcode.InvalidColumnReference
}

func (f *identityFacts) problems(t *outbox.Table, p *check.Findings) {
	advice := "ALTER PUBLICATION <its name> SET (publish = 'insert'): its columns, or its condition, " +
		"do not go with the table's replica identity"
	if len(f.without) > 0 {
		var statements []string
		for _, name := range f.without {
			statements = append(statements, "ALTER TABLE "+name+" REPLICA IDENTITY FULL")
		}
		advice = "as its owner: " + strings.Join(statements, "; ")
	}
	p.If(f.refused != nil, "table-replica-identity", hint.Wrap(
		fmt.Errorf("a publication has updates and deletions of %s, so the server refuses its marks: %w",
			t, f.refused), advice))
}
