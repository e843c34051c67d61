package table

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// withJournal makes an append-only table.
func withJournal(t *testing.T, pg *testenv.Postgres) (db *DB, table *outbox.Table, exec func(sql string)) {
	table = &outbox.Table{Schema: "public", Name: outbox.AppendTable, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal}
	cfg, err := pgx.ParseConfig(pg.NewDB(t))
	must(t, err)
	m := migrations.New(cfg, []*outbox.Table{table})
	defer m.Close()
	_, err = m.Up(t.Context(), migrations.Latest)
	must(t, err)
	db, err = Open(t.Context(), Config{URL: cfg.ConnString(), Slot: "walpost"})
	must(t, err)
	t.Cleanup(func() { db.Close() })
	must(t, db.CheckTable(t.Context(), table))
	return db, table, func(sql string) {
		t.Helper()
		_, err := db.Conn().Exec(t.Context(), sql)
		must(t, err)
	}
}

// Behind a long backlog, and beside many entries of the journal, statements read the rows and entries that they are about:
// before the tables were ever analysed, and after.
func TestPlansOfJournal(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		db, table, exec := withJournal(t, pg)
		// 100,000 rows are delivered, in entries of 5, but for holes and for the last 100. As many are pending.
		exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 200000) g`)
		exec(`INSERT INTO public.outbox_journal (outbox, kind, ids, processed_at)
			SELECT 'public.outbox_events', 'stored', int8multirange(int8range(g * 5 + 1, g * 5 + 6 - (g < 5)::int)), now() - (20000 - g) * interval '1 second'
			FROM generate_series(0, 19999) g`)
		exec(`INSERT INTO public.outbox_deferred (outbox, id, last_error, available_at)
			SELECT 'public.outbox_events', g, 'refused', now() + interval '1 hour' FROM generate_series(100001, 100500) g`)
		exec(testenv.SettledTo("public.outbox_events", 99900, "[5,6),[10,11),[15,16)"))

		ids, hashes := make([]string, 1000), make([]int64, 1000)
		known := make([]int64, 1000)
		for i := range ids {
			known[i] = int64(99_501 + i)
			ids[i] = fmt.Sprint(known[i])
		}
		of := func(sql string, args ...any) query { return query{sql, args} }
		queries := func(table *outbox.Table) map[string]query {
			fetch, _ := fetchSQL(table, 1<<20, lengthSQL)
			return map[string]query{
				"fetch":       of(fetch, ids),
				"fresh":       of(freshSQL(table, time.Second, anyHalf(table, time.Second), orderSQL(table, "t"), db.own.deadLetters), 1000),
				"known":       of(knownSQL(table), known, ranges(known)),
				"mark":        of(db.markSQL(table, entrySQL), ranges(known)),
				"due":         of(fmt.Sprintf("SELECT min(t.available_at) FROM %s t WHERE t.available_at > now()", sourceOf(table).due)),
				"oldest":      of(oldestSQL(table, db.own.deadLetters)),
				"recorded":    of(recordedListSQL(table, true, "now()", "") + " ORDER BY " + listedSQL(table) + " LIMIT 1000"),
				"overtaken":   of(overtakenSQL(table, time.Second)),
				"look up":     of(lookUpSQL(table, nil), ids, hashes, make([]*string, 1000), ranges(slices.Clone(known))),
				"progress":    of(toSettleSQL(table, "true"), nil, 100_500, 0),
				"taken to":    of(takenToSQL(table)),
				"step":        of(stepSQL(table), nil, 100_500, 1000),
				"page":        of(sourceOf(table).page, time.Time{}, 1000),
				"marked":      of(markedListSQL(table, sourceOf(table), "", "true"), time.Now().Add(-5*time.Hour), "", 1000, time.Now().Add(-5*time.Hour).Add(199*time.Second)),
				"unmark":      of(unmarkSQL(table), ids, hashes, make([]time.Time, len(ids))),
				"pending":     of(fmt.Sprintf("SELECT t.id FROM %s t WHERE t.id = ANY ($1::text[]::bigint[]) AND %s", sourceOf(table).all(givenIDs), UnmarkedSQL(table, "t")), ids),
				"find":        of(fmt.Sprintf("SELECT t.id FROM unnest($1::text[]) w(id) JOIN %s ON NOT %s", byIDSQL(table, sourceOf(table).all(givenIDs), ""), DeadSQL(table, "t", givenIDs)), ids),
				"replay":      of(fmt.Sprintf("SELECT t.id FROM %s t WHERE t.id = ANY ($1::text[]::bigint[])", sourceOf(table).markedByID(givenIDs)), ids),
				"hold":        of(holdSQL(table), ids, hashes, make([]*string, 1000), make([]*string, 1000), make([]*int, 1000), make([]*string, 1000), make([]*string, 1000)),
				"dead letter": of(MarkOf(table).deadLetterSQL(table, db.own.deadLetters), ids, hashes, make([]*string, 1000), make([]*string, 1000), make([]*int, 1000), make([]*string, 1000), make([]*string, 1000)),
				"overlooked":  of(overlookedSQL(table), 1, 1000),
				"dead":        of("SELECT "+DeadSQL(table, "t", "(SELECT unnest($1::bigint[]) AS id)")+" FROM public.outbox_events t WHERE t.id = ANY ($1)", known),
			}
		}
		some := *table
		some.Where, some.Filter = `event_type <> 'order.failed'`, outbox.RowAlias+`.event_type <> 'order.failed'`
		for _, prepare := range []string{`SELECT`, `ANALYZE`} {
			exec(prepare)
			for name, q := range queries(table) {
				readsFew(t, db.Conn(), name, q)
			}
			exec(`UPDATE public.outbox_known SET condition = '` + strings.ReplaceAll(some.Where, "'", "''") + `'`)
			for name, q := range queries(&some) {
				readsFew(t, db.Conn(), name+" of some rows", q)
			}
			exec(`UPDATE public.outbox_known SET condition = ''`)
		}
	})
}

// node is a part of a plan, as EXPLAIN has it in JSON.
type node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Index    string  `json:"Index Name"`
	Rows     float64 `json:"Actual Rows"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Rechecks float64 `json:"Rows Removed by Index Recheck"`
	Loops    float64 `json:"Actual Loops"`
	Plans    []node
}

// readsFew runs a statement, and takes it back.
func readsFew(t *testing.T, conn *pgx.Conn, name string, q query) {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	must(t, err)
	defer tx.Rollback(context.WithoutCancel(t.Context())) //nolint:errcheck // the test's end closes the connection
	var plans []struct{ Plan node }
	must(t, tx.QueryRow(t.Context(), "EXPLAIN (ANALYZE, FORMAT JSON) "+q.sql, q.args...).Scan(&plans))
	var walk func(n node)
	walk = func(n node) {
		read := (n.Rows + n.Filtered + n.Rechecks) * n.Loops
		if strings.HasPrefix(n.Relation, "outbox_") && read > 5000 {
			t.Errorf("%s: %s of %s by %s reads %.0f rows", name, n.Type, n.Relation, n.Index, read)
		}
		if n.Index == "outbox_journal_ids_idx" && n.Loops > 1 { // see entriesOfSQL
			t.Errorf("%s: the index of the journal's ids is searched %.0f times", name, n.Loops)
		}
		for _, child := range n.Plans {
			walk(child)
		}
	}
	walk(plans[0].Plan)
}

// TestMarkedPages: a page of marked rows reads few of the others in a table that was never analysed, whose
// journal looks small to the planner, and no page leaves out a row: some entries' rows are gone, rows have
// several entries, and entries have the same time.
func TestMarkedPages(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		db, table, exec := withJournal(t, pg)
		exec(`ALTER TABLE public.outbox_events DISABLE TRIGGER USER`)
		exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 50000) g`)
		exec(`INSERT INTO public.outbox_journal (outbox, kind, ids, processed_at)
			SELECT 'public.outbox_events', 'stored', int8multirange(int8range(g * 500 + 1, g * 500 + 501)), now() - (100 - g) * interval '1 second'
			FROM generate_series(0, 99) g`)
		var last *time.Time
		since := time.Unix(0, 0)
		must(t, db.QueryRow(t.Context(), []any{&last}, sourceOf(table).page, since, 1000))
		list := markedListSQL(table, sourceOf(table), "", "true")
		readsFew(t, db.Conn(), "marked", query{list, []any{since, "", 1000, last}})

		exec(`DELETE FROM public.outbox_events WHERE id > 3000 OR id % 3 = 0`)
		exec(`DELETE FROM public.outbox_journal`)
		exec(`SELECT setseed(0.5)`)
		exec(`INSERT INTO public.outbox_journal (outbox, kind, ids, processed_at)
			SELECT 'public.outbox_events', 'stored', int8multirange(int8range(a, a + b)), timestamptz '2026-01-01' + c * interval '1 microsecond'
			FROM (SELECT (random() * 3000)::int AS a, (random() * 100)::int AS b, (random() * 50)::int AS c FROM generate_series(1, 80)) x
			UNION ALL SELECT 'public.outbox_events', 'stored', int8multirange(int8range(4000 + g, 4003 + g)), timestamptz '2026-01-01 00:00:00.00001'
			FROM generate_series(1, 2100) g
			UNION ALL SELECT 'public.outbox_events', 'stored', int8multirange(int8range(2990, NULL)), timestamptz '2026-01-02'`)
		var want []string
		must(t, db.QueryRow(t.Context(), []any{&want}, `SELECT array_agg(DISTINCT concat((extract(epoch FROM j.processed_at) * 1000000)::bigint, ' ', e.id))
			FROM public.outbox_journal j JOIN public.outbox_events e ON j.ids @> e.id`))
		for _, limit := range []int{1, 7, 100, 1000} {
			var got []string
			for next, full := (MarkCursor{}), true; full; {
				rows, err := db.MarkedSince(t.Context(), table, since, &next, limit)
				must(t, err)
				for _, r := range rows {
					got = append(got, fmt.Sprintf("%d %s", r.Marked.UnixMicro(), r.ID))
				}
				full = len(rows) == limit
			}
			slices.Sort(got)
			got = slices.Compact(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("pages of %d have %d marks, want %d", limit, len(got), len(want))
			}
		}
	})
}
