package table

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// TestGrownRows: rows that were changed into larger ones than any message are other rows by now, and no statement
// reads what they hold: there is no time for it.
func TestGrownRows(t *testing.T) {
	table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	url := testenv.SharedPostgres(t).NewDB(t)
	cfg, err := pgx.ParseConfig(url)
	must(t, err)
	m := migrations.New(cfg, []*outbox.Table{table})
	defer m.Close()
	_, err = m.Up(t.Context(), migrations.Latest)
	must(t, err)
	app, err := pgx.Connect(t.Context(), url)
	must(t, err)
	defer app.Close(t.Context())
	_, err = app.Exec(t.Context(), `ALTER TABLE outbox_messages ALTER payload TYPE text`)
	must(t, err)
	result, err := app.Query(t.Context(), `INSERT INTO public.outbox_messages AS t (aggregate_type, aggregate_id, event_type, payload, processed_at)
		SELECT 'order', g, 'order.placed', '{}', CASE WHEN g > 2 THEN now() END FROM generate_series(1, 4) g RETURNING id::text, `+table.HashSQL("t"))
	must(t, err)
	var refs []outbox.Ref
	var rows []Row
	var id string
	var hash int64
	_, err = pgx.ForEachRow(result, []any{&id, &hash}, func() error {
		ref := outbox.Ref{Table: table, ID: id, Hash: uint64(hash)}
		refs, rows = append(refs, ref), append(rows, Row{Ref: ref})
		return nil
	})
	must(t, err)
	_, err = app.Exec(t.Context(), `UPDATE outbox_messages SET payload = repeat('x', 200 << 20) WHERE id IN (2, 4)`)
	must(t, err)
	db := openLimited(t, url, table, 4, func(db *DB) error {
		var hash int64
		return db.QueryRow(t.Context(), []any{&hash}, `SELECT hashtextextended(concat(payload) COLLATE "C", 0) FROM public.outbox_messages WHERE id = 2`)
	})

	states, err := db.LookUp(t.Context(), table, rows)
	must(t, err)
	for i, s := range states {
		if !s.Exists || s.Same != (i%2 == 0) {
			t.Errorf("row %s: %+v", rows[i].Ref.ID, s)
		}
	}
	marked, err := db.MarkedSince(t.Context(), table, time.Time{}, &MarkCursor{}, 100)
	if err != nil || len(marked) != 1 || marked[0].Ref != refs[2] {
		t.Errorf("listed as marked are %v, want row 3: %v", marked, err)
	}
	found, err := db.Find(t.Context(), table, refs)
	if err != nil || found[0].Place != Pending || found[1].Place != Nowhere || found[2].Place != Marked || found[3].Place != Nowhere {
		t.Errorf("the rows are found at %v: %v", found, err)
	}
	whole := map[int]bool{}
	err = db.Whole(t.Context(), table, rows, 1<<20, func(n int, ev *outbox.Event) { whole[n] = true })
	if err != nil || !whole[0] || whole[1] {
		t.Errorf("the whole rows %v are read: %v", whole, err)
	}
	_, err = app.Exec(t.Context(), `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, last_error)
		SELECT payload, 1, 'order.placed', '{}', CASE n WHEN 2 THEN 'x' END FROM outbox_messages, generate_series(1, 2) n WHERE id = 2`)
	must(t, err)
	cs, err := db.Fresh(t.Context(), table, time.Second, 10)
	if err != nil || len(cs) != 3 {
		t.Errorf("%d rows are listed as pending, want 3: %v", len(cs), err)
	}
	aggregates := 0
	must(t, db.Aggregates(t.Context(), table, func(key outbox.AggregateKey) { aggregates++ }))
	if aggregates != 1 {
		t.Errorf("%d aggregates have recorded rows, want 1", aggregates)
	}
	_, err = app.Exec(t.Context(), `DELETE FROM outbox_messages WHERE id > 4`)
	must(t, err)
	_, err = db.Mark(t.Context(), table, rows[:2])
	must(t, err)
	_, locked, err := db.Unmark(t.Context(), table, []MarkedRow{{Ref: refs[3], Marked: marked[0].Marked}})
	if err != nil || len(locked) != 0 {
		t.Errorf("%d rows are locked: %v", len(locked), err)
	}
	var pending string
	must(t, app.QueryRow(t.Context(), `SELECT string_agg(id::text, ' ') FROM outbox_messages WHERE processed_at IS NULL`).Scan(&pending))
	if pending != "2" {
		t.Errorf("rows %s are pending, want 2", pending)
	}
}
