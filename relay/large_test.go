package relay_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestLargeAppendOnlyTable prints how long a start takes and how fast rows are delivered and journaled, with an empty
// outbox_events, beside many rows in 20 partitions, and where the progress stands behind a tenth of them, as after a crash
// in a long outage. It asserts nothing about times.
func TestLargeAppendOnlyTable(t *testing.T) {
	rows, _ := strconv.Atoi(os.Getenv("WALPOST_LARGE_ROWS"))
	if rows == 0 {
		t.Skip("WALPOST_LARGE_ROWS says how many rows, on a quiet machine with space for them")
	}
	pg := testenv.NewPostgres(t, testenv.PGOptions{Settings: map[string]string{"max_wal_size": "8GB"}})
	r := newRigWith(t, pg, testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	events := &outbox.Table{Schema: "public", Name: outbox.AppendTable, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal}
	r.migrate(events)
	r.cfg.Outboxes = []*outbox.Table{events}
	r.cfg.Stream.Batching = jetstream.BatchFast
	const some = 200_000
	insert := func(n int) {
		for ; n > 0; n -= 1_000_000 {
			r.exec(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'order', g % 1000, 'order.placed', '{}' FROM generate_series(1, $1::int) g`, min(n, 1_000_000))
		}
	}
	journaled := func() int {
		return r.count(`SELECT coalesce(sum(upper(r) - lower(r)), 0)::int FROM outbox_journal, unnest(ids) r WHERE kind = 'stored'`)
	}
	measure := func(what string) {
		var starts, rates []float64
		for range 5 {
			before := journaled()
			begun := time.Now()
			x := r.start().streaming()
			starts = append(starts, time.Since(begun).Seconds())
			x.halt()
			for range some / 100 {
				insert(100)
			}
			begun = time.Now()
			x = r.start()
			eventually(t, "all is journaled", func() bool { return journaled() == before+some })
			rates = append(rates, some/time.Since(begun).Seconds())
			x.halt()
		}
		slices.Sort(starts)
		slices.Sort(rates)
		t.Logf("%s: a start takes %.3f s, %.0f rows/s are delivered and journaled (medians of %v and %.0f)",
			what, starts[2], rates[2], starts, rates)
	}
	measure("empty table")
	r.exec(`DROP TABLE outbox_events_2000000`)
	r.exec(`DROP TABLE outbox_events_rest`)
	for i := range 20 {
		r.exec(fmt.Sprintf(`CREATE TABLE outbox_events_%d PARTITION OF outbox_events FOR VALUES FROM (%d) TO (%d)
				WITH (autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1)`,
			100+i, 2_000_001+i*(rows/20), 2_000_001+(i+1)*(rows/20)))
	}
	r.exec(fmt.Sprintf(`CREATE TABLE outbox_events_rest PARTITION OF outbox_events FOR VALUES FROM (%d) TO (MAXVALUE)`, 2_000_001+rows))
	r.exec(`SELECT setval('outbox_events_id_seq', 2000000)`)
	begun := time.Now()
	insert(rows)
	settle := func(from, to int) {
		r.exec(`INSERT INTO outbox_journal (outbox, kind, ids, processed_at)
			SELECT 'public.outbox_events', 'skipped', int8multirange(int8range(g, least(g + 1000, $2::bigint + 1))), now() - interval '1 day'
			FROM generate_series($1::bigint, $2::bigint, 1000) g`, from, to)
	}
	settle(2_000_001, 2_000_000+rows)
	r.exec(`UPDATE outbox_known SET unsettled = int8multirange(int8range($1::bigint, NULL, '()')), partitions = `+testenv.PartitionsOf("outbox_events"), 2_000_000+rows)
	r.dropSlot(r.cfg.Slot) // its WAL has all of them
	r.start().streaming().halt()
	r.exec(`ANALYZE outbox_events`)
	r.exec(`CHECKPOINT`)
	t.Logf("%d rows are written after %s", rows, time.Since(begun).Round(time.Second))
	measure(fmt.Sprintf("%d rows in 20 partitions", rows))
	r.exec(`UPDATE outbox_known SET unsettled = int8multirange(int8range(`+testenv.Settled+` - $1::bigint, NULL, '()'))`, rows/10)
	begun = time.Now()
	x := r.start().streaming()
	t.Logf("%d rows above the progress: a start takes %s", rows/10, time.Since(begun).Round(time.Millisecond))
	x.halt()
}

// TestLongTransactions prints what searches take, and how far the progress is behind, while a hundred transactions stay open
// beside sessions that commit as fast as they can.
func TestLongTransactions(t *testing.T) {
	seconds, _ := strconv.Atoi(os.Getenv("WALPOST_OPEN_SECONDS"))
	if seconds == 0 {
		t.Skip("WALPOST_OPEN_SECONDS says how long they stay open, on a quiet machine")
	}
	r := newRigWith(t, testenv.NewPostgres(t, testenv.PGOptions{Settings: map[string]string{"max_connections": "200"}}), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	events := &outbox.Table{Schema: "public", Name: outbox.AppendTable, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal}
	r.migrate(events)
	r.cfg.Outboxes = []*outbox.Table{events}
	r.cfg.Stream.Batching = jetstream.BatchFast
	const insert = `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', $1::int, 'order.placed', '{}')`
	r.cfg.FallbackInterval = 2 * time.Second
	x := r.start().streaming()
	var open []pgx.Tx
	for i := range 100 {
		tx, err := r.conn().Begin(t.Context())
		r.must(err)
		_, err = tx.Exec(t.Context(), insert, i)
		r.must(err)
		open = append(open, tx)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var writers sync.WaitGroup
	var committed atomic.Int64
	for range 8 {
		conn := r.conn()
		writers.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if i%100 == 99 { // an id without a row
					if _, err := conn.Exec(t.Context(), `BEGIN; INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.placed', '{}'); ROLLBACK`); err != nil {
						t.Error(err)
					}
				}
				if _, err := conn.Exec(t.Context(), insert, i%1000); err != nil {
					t.Error(err)
					return
				}
				committed.Add(1)
			}
		})
	}
	db, err := table.Open(t.Context(), table.Config{URL: r.url, Slot: r.cfg.Slot})
	r.must(err)
	defer db.Close()
	r.must(db.Unbind(t.Context()))
	r.must(db.CheckTable(t.Context(), events))
	const looks = 6
	for range looks {
		before := committed.Load()
		time.Sleep(time.Duration(seconds) * time.Second / looks)
		begun := time.Now()
		_, err := db.Fresh(t.Context(), events, time.Second, 16_384)
		r.must(err)
		took := time.Since(begun)
		t.Logf("%d commits/s, %d not stored yet; a search takes %s; %s", (committed.Load()-before)*looks/int64(seconds),
			committed.Load()-int64(r.storedCount()), took.Round(100*time.Microsecond), r.query1(`SELECT format('the progress is %s ids behind, with %s holes',
				(SELECT max(id) FROM outbox_events) - `+testenv.Settled+`, (SELECT count(*) FROM unnest(`+testenv.Holes+`))) FROM outbox_known`))
	}
	stop()
	writers.Wait()
	for i, tx := range open {
		if i%2 == 0 {
			r.must(tx.Commit(t.Context()))
		} else {
			r.must(tx.Rollback(t.Context()))
		}
	}
	eventually(t, "all is stored", func() bool { return int64(r.storedCount()) == committed.Load()+50 })
	eventually(t, "the progress has come to the end, without a hole", func() bool {
		return r.count(`SELECT count(*) FROM outbox_known WHERE `+testenv.Settled+` = (SELECT max(id) FROM outbox_events) AND isempty(`+testenv.Holes+`)`) == 1
	})
	x.quietBut("row_unsettled")
}
