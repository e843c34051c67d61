package table

import (
	"context"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/outbox"
)

// index is one that the canonical table comes with.
type index struct {
	columns []outbox.Field // none: the hash of the aggregate
	// where is its condition; a whole index does as well where whole is set.
	where   func(*outbox.Table) string
	whole   bool
	sharded bool   // of a shard it begins with what tells the shards apart
	without string // what happens without it
}

var indexes = []index{
	{
		columns: []outbox.Field{outbox.ID},
		where:   isPending,
		sharded: true,
		without: "every search for pending rows reads through the delivered ones",
	},
	{
		columns: []outbox.Field{outbox.AvailableAt, outbox.ID},
		where:   isPending,
		sharded: true,
		without: "every search for due rows reads all pending ones",
	},
	{
		columns: []outbox.Field{outbox.ProcessedAt},
		where:   func(t *outbox.Table) string { return t.Column(outbox.ProcessedAt) + " IS NOT NULL" },
		whole:   true,
		without: "nothing is archived, and a start that looks for lost rows reads the whole table",
	},
	{
		where:   func(t *outbox.Table) string { return UnmarkedSQL(t, "") + " AND " + recordedIs(t, "") },
		without: "every look for held aggregates reads all pending rows",
	},
}

func isPending(t *outbox.Table) string { return t.PendingSQL("") }

// wanted reports whether a table needs the index. How the owners of other tables search them is not known,
// but that no index of theirs answers to a status as the relay asks for it. Only the relay looks for held
// aggregates.
func (x index) wanted(t *outbox.Table) bool {
	if !Changes(t) { // with a journal, that has the indexes
		return false
	}
	if x.columns == nil {
		return findsAggregates(t)
	}
	return MarkOf(t).Stays() && (t.Layout.Name == outbox.Canonical().Name || t.Layout.Has(outbox.Status)) &&
		!slices.ContainsFunc(x.columns, func(f outbox.Field) bool { return !t.Layout.Has(f) })
}

func (x index) on(t *outbox.Table) string {
	if x.columns == nil {
		return t.AggregateHashSQL("")
	}
	columns := make([]string, len(x.columns))
	for i, c := range x.columns {
		columns[i] = t.Column(c)
	}
	if x.ofShard(t) {
		columns = append([]string{"(" + t.ShardKeySQL("") + ")"}, columns...)
	}
	return strings.Join(columns, ", ")
}

func (x index) ofShard(t *outbox.Table) bool { return x.sharded && !t.Shard.All() }

// missing is the text of a finding.
func (x index) missing(t *outbox.Table) string {
	if x.ofShard(t) {
		whole := *t
		whole.Shard = outbox.Shard{}
		return fmt.Sprintf("table %s has no index on (<shard key>, %s) where %s: "+
			"every search for pending rows reads through those of the other shards",
			t, unquoted(x.on(&whole)), unquoted(x.where(t)))
	}
	return fmt.Sprintf("table %s has no index on (%s) where %s: %s",
		t, unquoted(x.on(t)), unquoted(x.where(t)), x.without)
}

// is reports whether an index of the table, as columns and predicate, serves as well.
func (x index) is(t *outbox.Table, columns, predicate string) bool {
	return strings.HasPrefix(plain(columns)+",", plain(x.on(t))+",") &&
		(plain(predicate) == plain(x.where(t)) || x.whole && predicate == "")
}

// added is what the server adds to an expression: casts, quotes, parentheses and spaces.
var added = regexp.MustCompile(`::(?:character varying|"?\w+"?(?:\."?\w+"?)?)|[()\s"']`)

func plain(sql string) string {
	return spelt.Replace(strings.ToLower(added.ReplaceAllString(sql, "")))
}

// spelt: a boolean's text is one letter, and its literal a word.
var spelt = strings.NewReplacer("fromtrue", "fromt", "fromfalse", "fromf")

func unquoted(sql string) string { return strings.ReplaceAll(sql, `"`, "") }

// IndexFindings names the indexes that the table lacks, of those that the canonical one comes with.
func (db *DB) IndexFindings(ctx context.Context, t *outbox.Table) (f check.Findings, err error) {
	type found struct{ Columns, Predicate string }
	var have []found
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		rows, _ := conn.Query(ctx, `SELECT (
				SELECT string_agg(pg_get_indexdef(i.indexrelid, k, false), ', ' ORDER BY k)
				FROM generate_series(1, i.indnkeyatts) k),
				coalesce(pg_get_expr(i.indpred, i.indrelid), '')
			FROM pg_index i WHERE i.indrelid = to_regclass($1) AND i.indisvalid`, t.SQL())
		have, err = pgx.CollectRows(rows, pgx.RowToStructByPos[found])
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("read indexes of %s: %w", t, err)
	}
	for _, x := range indexes {
		exists := func(i found) bool { return x.is(t, i.Columns, i.Predicate) }
		if x.wanted(t) && !slices.ContainsFunc(have, exists) {
			create := fmt.Sprintf("CREATE INDEX CONCURRENTLY ON %s (%s) WHERE %s",
				t.SQL(), x.on(t), x.where(t))
			f.Warning("table-index", create, "%s", x.missing(t))
		}
	}
	return f, nil
}

// manyRows is how many rows a table has before it pays to partition it.
const manyRows = 50_000_000

// SizeFindings say that a table is so large that it should be partitioned, or that this was broken off, or
// the cutting of a partition was.
func (db *DB) SizeFindings(ctx context.Context, t *outbox.Table) (f check.Findings, err error) {
	var rows float64 // as of the last ANALYZE, or VACUUM
	var refusing, refuses string
	err = db.QueryRow(ctx, []any{&rows, &refusing, &refuses}, `
		SELECT CASE c.relkind WHEN 'r' THEN c.reltuples ELSE 0 END,
			coalesce(k.conrelid::regclass::text, ''), coalesce(pg_get_constraintdef(k.oid), '')
		FROM pg_class c LEFT JOIN pg_constraint k ON k.conname = $2 AND k.contype = 'c' AND k.coninhcount = 0
			AND k.conrelid = ANY (c.oid || ARRAY(SELECT relid::oid FROM pg_partition_tree(c.oid)))
		WHERE c.oid = to_regclass($1) LIMIT 1`, t.SQL(), partition.Constraint)
	if err != nil {
		return nil, fmt.Errorf("read the size of %s: %w", t, err)
	}
	byMonth := Changes(t) && t.Layout.Has(outbox.OccurredAt)
	switch {
	case refuses != "" && Journals(t):
		f.Warning("table-half-partitioned",
			fmt.Sprintf("run `walpost retention`, or: ALTER TABLE %s DROP CONSTRAINT %s",
				refusing, partition.Constraint),
			"partition %s of %s was to be cut, which was broken off, or is being done: meanwhile it has %s",
			refusing, t, refuses)
	case refuses != "" && byMonth:
		f.Warning("table-half-partitioned", fmt.Sprintf("run `walpost migrate up --partition month` again, "+
			"or: ALTER TABLE %s DROP CONSTRAINT %s", t.SQL(), partition.Constraint),
			"%s was to be partitioned by month, which was broken off, or is being done: meanwhile it has %s",
			t, refuses)
	case byMonth && rows > manyRows:
		f.Warning("table-large", "run `walpost migrate up --partition month`, and see docs/TABLES.md: "+
			"months go as a whole, instead of row by row",
			"%s has about %.0f million rows and is not partitioned", t, rows/1e6)
	}
	return f, nil
}
