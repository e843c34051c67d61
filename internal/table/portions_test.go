package table

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// TestLargeRowsHavePortions: every statement that hashes rows gets through four hundred large ones, although
// together they take longer than a statement may, and the connection with the lock survives.
func TestLargeRowsHavePortions(t *testing.T) {
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
	const many = 400
	result, err := app.Query(t.Context(), `INSERT INTO public.outbox_messages AS t (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', g, 'order.placed', (SELECT jsonb_agg(n) FROM generate_series(1, 10000) n) FROM generate_series(1, $1::int) g RETURNING id::text, `+table.HashSQL("t"), many)
	must(t, err)
	var rows []Row
	var refs []outbox.Ref
	var id string
	var hash int64
	_, err = pgx.ForEachRow(result, []any{&id, &hash}, func() error {
		ref := outbox.Ref{Table: table, ID: id, Hash: uint64(hash)}
		rows, refs = append(rows, Row{Ref: ref}), append(refs, ref)
		return nil
	})
	must(t, err)

	whole := func(db *DB) error {
		_, err := db.lookUp(t.Context(), table, rows, nil)
		return err
	}
	db := openLimited(t, url, table, 2, whole) // a single row has to be done in that time, too, on a busy machine
	if err := whole(db); !TooLong(err) {
		t.Fatalf("all rows in one statement: %v, want it to take too long: the test shows nothing", err)
	}
	each := func(what string, do func() (int, error)) {
		t.Helper()
		db.portion.rows.Store(0)
		n, err := do()
		if err != nil || n != many {
			t.Errorf("%s: %d rows, want %d: %v", what, n, many, err)
		}
	}
	each("look up", func() (n int, err error) {
		states, err := db.LookUp(t.Context(), table, rows)
		for _, s := range states {
			if s.Publish() && s.Same {
				n++
			}
		}
		return n, err
	})
	each("find", func() (n int, err error) {
		found, err := db.Find(t.Context(), table, refs)
		for _, f := range found {
			if f.Place == Pending {
				n++
			}
		}
		return n, err
	})
	each("mark", func() (n int, err error) {
		verdicts, err := db.Mark(t.Context(), table, rows)
		for _, v := range verdicts {
			if v == Done {
				n++
			}
		}
		return n, err
	})
	var marked []MarkedRow
	each("marked since", func() (int, error) {
		marked, err = db.MarkedSince(t.Context(), table, time.Time{}, &MarkCursor{}, 1000)
		return len(marked), err
	})
	each("unmark", func() (int, error) {
		pending, _, err := db.Unmark(t.Context(), table, marked)
		return len(pending), err
	})
	if !db.Alive() {
		t.Error("the connection is lost")
	}
}

// TestHeldAggregatesHavePortions: a table without an index for it is asked about as many aggregates at once as it has
// time for.
func TestHeldAggregatesHavePortions(t *testing.T) {
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
	_, err = app.Exec(t.Context(), `DROP INDEX outbox_messages_recorded_idx;
		INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, last_error) SELECT 'order', g, 'x', '{}', 'held: ' FROM generate_series(1, 5000) g`)
	must(t, err)
	events := make([]*outbox.Event, 512)
	for i := range events {
		events[i] = &outbox.Event{Table: table}
		events[i].Values[outbox.TenantID], events[i].Values[outbox.AggregateType] = []byte("0"), []byte("order")
		events[i].Values[outbox.AggregateID] = []byte(strconv.Itoa(5000 - len(events)/2 + i + 1))
	}
	db := openLimited(t, url, table, 4, func(db *DB) error {
		_, err := db.HaveRecords(t.Context(), table, events)
		return err
	})
	have, err := db.HaveRecords(t.Context(), table, events)
	must(t, err)
	for i, yes := range have {
		if yes != (i < len(events)/2) {
			t.Fatalf("aggregate %s has records: %t", events[i].Values[outbox.AggregateID], yes)
		}
	}
	if db.portion.most() >= len(events) {
		t.Error("there was time for all at once: the test shows nothing")
	}
}

// openLimited returns a connection whose statements may take a quarter of what one takes here and now, or another part of
// it.
func openLimited(t *testing.T, url string, table *outbox.Table, part time.Duration, statement func(*DB) error) *DB {
	t.Helper()
	before := statementLimit
	t.Cleanup(func() { statementLimit = before })
	open := func(limit time.Duration) *DB {
		statementLimit = limit
		db, err := Open(t.Context(), Config{URL: url, Slot: "walpost"})
		must(t, err)
		t.Cleanup(db.Close)
		must(t, db.CheckTable(t.Context(), table))
		// A test may leave the connection idle for longer than a relay does.
		must(t, db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `SET idle_session_timeout = 0`)
			return err
		}))
		return db
	}
	free := open(10 * time.Minute)
	quickest := time.Hour
	for range 2 {
		begun := time.Now()
		must(t, statement(free))
		quickest = min(quickest, time.Since(begun))
	}
	return open(quickest / part)
}

// TestPortionsAreBoundedByBytes: the sizes of the items are known, and a statement has no more of them than it may read.
func TestPortionsAreBoundedByBytes(t *testing.T) {
	const mib = 1 << 20
	items := []int{mib, 15 * mib, 1, 40 * mib, 8 * mib, 8 * mib, 8 * mib}
	want := [][]int{{mib, 15 * mib}, {1}, {40 * mib}, {8 * mib, 8 * mib}, {8 * mib}}
	var got [][]int
	must(t, portions[int]{
		size: new(portionSize), bytes: func(n int) int { return n },
		do: func(some []int) error { got = append(got, slices.Clone(some)); return nil },
	}.run(items))
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("the portions have %d bytes, want %d", got, want)
	}
}
