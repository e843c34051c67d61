package table

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// Statistics of a queue are made when nothing is pending, and hold when a million
// rows are. Whatever they say, a statement looks up each of its rows by id: any
// other plan takes minutes for a thousand rows of a long queue.
func TestPlansGoByID(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
		url := pg.NewDB(t)
		cfg, err := pgx.ParseConfig(url)
		must(t, err)
		must(t, pg.Exec(t.Context(), "postgres", `ALTER DATABASE "`+cfg.Database+`" SET jit = on`))
		m := migrations.New(cfg, []*outbox.Table{table})
		defer m.Close()
		_, err = m.Up(t.Context(), migrations.Latest)
		must(t, err)
		db, err := Open(t.Context(), Config{URL: url, Slot: "walpost"})
		must(t, err)
		defer db.Close()
		var jit string
		must(t, db.Conn().QueryRow(t.Context(), `SHOW jit`).Scan(&jit))
		if jit != "off" {
			t.Errorf("jit is %s: a search of thousands of rows is compiled, which takes longer than the search", jit)
		}
		must(t, db.CheckTable(t.Context(), table))

		deleted := *table
		deleted.Mark = outbox.MarkDelete
		const insert = `INSERT INTO public.outbox_messages (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 20000) g`
		columns, err := returnedColumns(t.Context(), db.Conn(), table, db.own.archive)
		must(t, err)
		ids, hashes := slices.Repeat([]string{"1"}, portionRows), make([]int64, portionRows)
		known := []any{ids, hashes, make([]*string, portionRows)}
		all := append(slices.Clone(known), ids, make([]*int, portionRows), make([]*time.Duration, portionRows), make([]*string, portionRows))
		queries := map[string]query{
			"update":      {markSQL(table, updateSQL(table)), known},
			"delete":      {markSQL(&deleted, deleteSQL(&deleted)), known},
			"park":        {parkSQL(table, time.Second), all},
			"hold":        {holdSQL(table), all},
			"dead letter": {inRow{}.deadLetterSQL(table, db.own.deadLetters), all},
			"look up":     {lookUpSQL(table, nil), []any{ids, hashes, make([]*string, portionRows)}},
			"read back":   {lookUpSQL(table, attributesOf(table)), []any{ids, hashes, make([]*string, portionRows)}},
			"whole rows":  {wholeSQL(table, eventFieldsOf(table), 1<<20), []any{ids, hashes}},
			"unmark":      {unmarkSQL(table), []any{ids, hashes, make([]time.Time, portionRows)}},
			"return":      {returnSQL(table, db.own.archive, columns), []any{ids, hashes, make([]time.Time, portionRows)}},
		}
		for _, empty := range [][]string{
			{`UPDATE public.outbox_messages SET processed_at = now()`, `VACUUM ANALYZE public.outbox_messages`},
			{`DELETE FROM public.outbox_messages`, `VACUUM ANALYZE public.outbox_messages`},
			// A vacuum that cannot cut the table leaves pages which hold no row: so will those that come.
			{`DELETE FROM public.outbox_messages`, `VACUUM (ANALYZE, TRUNCATE false) public.outbox_messages`},
		} {
			for _, sql := range slices.Concat([]string{insert}, empty, []string{insert}) {
				_, err := db.Conn().Exec(t.Context(), sql)
				must(t, err)
			}
			for name, q := range queries {
				rows, err := db.Conn().Query(t.Context(), "EXPLAIN (COSTS OFF) "+q.sql, q.args...)
				must(t, err)
				readPlan(t, name, rows, byID...)
			}
		}

		haveRecords, err := db.haveRecordsSQL(t.Context(), table)
		must(t, err)
		rows, err := db.Conn().Query(t.Context(), "EXPLAIN (COSTS OFF) "+haveRecords, []string{}, []int64{}, []string{}, []int64{})
		must(t, err)
		readPlan(t, "have records", rows, "Seq Scan on outbox_messages", "outbox_messages_pending_idx", "outbox_messages_due_idx", "Hash Join")

		// A great many rows that are scheduled for later are not looked at, whether or not the time may be NULL.
		for _, sql := range []string{`SET NOT NULL`, `DROP NOT NULL`} {
			_, err := db.Conn().Exec(t.Context(), `UPDATE public.outbox_messages SET available_at = now() + interval '1 day'; ALTER TABLE public.outbox_messages ALTER available_at `+sql)
			must(t, err)
			_, err = db.Conn().Exec(t.Context(), `VACUUM ANALYZE public.outbox_messages`)
			must(t, err)
			rows, err = db.Conn().Query(t.Context(), "EXPLAIN (COSTS OFF) "+freshByDueSQL(table, time.Second, db.own.deadLetters), 1000)
			must(t, err)
			readPlan(t, "fresh by due", rows, "Seq Scan on outbox_messages", "_pending_idx")
		}
		rows, err = db.Conn().Query(t.Context(), "EXPLAIN (COSTS OFF) "+overtakenSQL(table, time.Second))
		must(t, err)
		readPlan(t, "overtaken", rows, "Nested Loop", "Join", "SubPlan")
	})
}

// So it is in tables that people have, with the indexes that doctor advises, or their own.
func TestPlansOfExistingTables(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		for name, existing := range map[string]struct{ create, insert, done, fresh string }{
			"eventferry": {
				create: `CREATE TABLE public.box (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id TEXT NOT NULL, topic TEXT NOT NULL,
					aggregate_type TEXT NOT NULL, aggregate_id TEXT NOT NULL, partition_key TEXT, payload JSONB NOT NULL, headers JSONB NOT NULL DEFAULT '{}',
					trace_id TEXT, status SMALLINT NOT NULL DEFAULT 0, attempts INT NOT NULL DEFAULT 0, claimed_at TIMESTAMPTZ, next_retry_at TIMESTAMPTZ,
					created_at TIMESTAMPTZ NOT NULL DEFAULT now(), processed_at TIMESTAMPTZ)`,
				insert: `INSERT INTO public.box (message_id, topic, aggregate_type, aggregate_id, payload) SELECT g, 'order.placed', 'order', g, '{}' FROM generate_series(1, 20000) g`,
				done:   `UPDATE public.box SET status = 2, processed_at = now()`,
				fresh:  "box_pkey",
			},
			"prisma": {
				create: `CREATE TABLE public.box (id TEXT PRIMARY KEY, "aggregateId" TEXT NOT NULL, "aggregateType" TEXT NOT NULL, "eventType" TEXT NOT NULL, payload JSONB NOT NULL,
					"publishedAt" TIMESTAMP(3), attempts INTEGER NOT NULL DEFAULT 0, "lastError" TEXT, "createdAt" TIMESTAMP(3) NOT NULL DEFAULT CURRENT_TIMESTAMP);
					CREATE INDEX ON public.box ("publishedAt", attempts)`,
				insert: `INSERT INTO public.box (id, "aggregateType", "aggregateId", "eventType", payload) SELECT gen_random_uuid(), 'order', g, 'order.placed', '{}' FROM generate_series(1, 20000) g`,
				done:   `UPDATE public.box SET "publishedAt" = now()`,
				fresh:  "box_pkey",
			},
		} {
			layout, _ := outbox.LayoutNamed(name)
			box := &outbox.Table{Schema: "public", Name: "box", Layout: layout, Mark: outbox.MarkUpdate}
			url := pg.NewDB(t)
			cfg, err := pgx.ParseConfig(url)
			must(t, err)
			must(t, pg.Exec(t.Context(), cfg.Database, existing.create))
			m := migrations.New(cfg, []*outbox.Table{box})
			defer m.Close()
			_, err = m.Up(t.Context(), migrations.Latest)
			must(t, err)
			db, err := Open(t.Context(), Config{URL: url, Slot: "walpost"})
			must(t, err)
			defer db.Close()
			run := func(sql string) {
				t.Helper()
				_, err := db.Conn().Exec(t.Context(), sql)
				must(t, err)
			}
			must(t, db.CheckTable(t.Context(), box))
			found, err := db.IndexFindings(t.Context(), box)
			must(t, err)
			for _, f := range found {
				run(f.Fix)
			}
			for range 4 {
				run(existing.insert)
			}
			run(existing.done)
			run(`VACUUM ANALYZE public.box`)
			run(existing.insert)
			ids, hashes := slices.Repeat([]string{"1"}, portionRows), make([]int64, portionRows)
			known := []any{ids, hashes, make([]*string, portionRows)}
			all := append(slices.Clone(known), ids, make([]*int, portionRows), make([]*time.Duration, portionRows), make([]*string, portionRows))
			for what, q := range map[string]query{
				"mark": {markSQL(box, updateSQL(box)), known}, "park": {parkSQL(box, time.Second), all}, "hold": {holdSQL(box), all},
				"dead letter": {inRow{}.deadLetterSQL(box, db.own.deadLetters), all}, "look up": {lookUpSQL(box, nil), known},
				"unmark": {unmarkSQL(box), []any{ids, hashes, make([]time.Time, portionRows)}},
			} {
				rows, err := db.Conn().Query(t.Context(), "EXPLAIN (COSTS OFF) "+q.sql, q.args...)
				must(t, err)
				readPlan(t, name+": "+what, rows, "Join Filter", "Seq Scan on box", "box_id_idx", "_processed_at_idx", "_publishedAt")
			}
			rows, err := db.Conn().Query(t.Context(), "EXPLAIN (COSTS OFF) "+
				freshSQL(box, time.Second, anyHalf(box, time.Second), orderSQL(box, "t"), db.own.deadLetters), 1000)
			must(t, err)
			readPlan(t, name+": fresh", rows, "Seq Scan on box", existing.fresh)
		}
	})
}

type query struct {
	sql  string
	args []any
}

// byID is what no plan has that goes by id.
var byID = []string{"Join Filter", "Seq Scan on outbox_messages", "_pending_idx", "_due_idx", "_processed_idx"}

func readPlan(t *testing.T, name string, rows pgx.Rows, never ...string) {
	t.Helper()
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	plan := strings.Join(lines, "\n")
	for _, bad := range never {
		if strings.Contains(plan, bad) {
			t.Errorf("%s: the plan has %q:\n%s", name, bad, plan)
			return
		}
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
