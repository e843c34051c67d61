package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestApplicationTouchesStoredRows: what an application does to a row between
// its PubAck and its mark pins nothing, and nobody is sent it twice.
func TestApplicationTouchesStoredRows(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, sql string
		changed   []int // the number of a row that is another message now
	}{
		{"deleted", `DELETE FROM outbox_messages`, nil},
		{"truncated", `TRUNCATE outbox_messages`, nil},
		{"archived", `UPDATE outbox_messages SET processed_at = now(); WITH gone AS (DELETE FROM outbox_messages RETURNING *) INSERT INTO outbox_messages_archive (outbox, id, processed_at) SELECT 'public.outbox_messages', id, processed_at FROM gone`, nil},
		{"marked by hand", `UPDATE outbox_messages SET processed_at = now()`, nil},
		{"payload changed", `UPDATE outbox_messages SET payload = '{"n": 1000}' WHERE payload ->> 'n' = '2'`, []int{1000, 1000}},
		{"deleted and inserted again", `WITH gone AS (DELETE FROM outbox_messages WHERE payload ->> 'n' = '2' RETURNING *)
			INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) SELECT id, 'order', 1, event_type, '{"n": 4}' FROM gone`, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.FallbackInterval = time.Second
			x := r.start().streaming()
			r.keep()
			taker := r.seize(putSQL, "order.placed", 1, 3)
			eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 3 })
			stored := r.here()
			r.pinned(stored)
			r.must(run(t.Context(), taker, c.sql+"; COMMIT"))
			r.passes(stored)
			want := 3
			if strings.Contains(c.sql, `"n": 4`) { // the same id, but another event
				want = 4
			}
			eventually(t, "all is stored", func() bool { return r.storedCount() == uint64(want+len(c.changed)/2) })
			r.pending(0)

			// The WAL brings all of it once more.
			x.halt()
			r.rewind()
			r.start().streaming()
			r.put(want+1, want+2)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(append([]int{1, want}, append(c.changed, want+1, want+2)...)...)
		})
	}
}

// TestApplicationTouchesUnsentRows: where the stream does not say what was sent,
// the table decides about rows that the application has touched since.
func TestApplicationTouchesUnsentRows(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.start().streaming().halt()
	r.put(1, 5)
	r.exec(`UPDATE outbox_messages SET payload = '{"n": 1000}' WHERE payload ->> 'n' = '2'`)
	r.exec(`DELETE FROM outbox_messages WHERE payload ->> 'n' = '3'`)
	r.exec(`UPDATE outbox_messages SET processed_at = now() WHERE payload ->> 'n' = '4'`)
	r.cfg.FallbackInterval = 100 * time.Millisecond
	x := r.start().streaming()
	r.put(6, 6)
	r.passes(r.here())
	r.pending(0)
	got := r.numbers()
	slices.Sort(got) // the changed row is the table's, and comes when its turn does
	if want := []int{1, 5, 6, 1000}; !slices.Equal(got, want) {
		t.Errorf("stored %v, want %v", got, want)
	}
	x.halt() // the pass that has found it counts it at its end
	if n := x.metric("walpost_missed_rows_total"); n != 1 {
		t.Errorf("walpost_missed_rows_total is %v, want 1", n)
	}
}

// TestTableIsLocked has the table locked by a migration, under a relay at work
// and under one that starts.
func TestTableIsLocked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.keep()
	r.put(1, 100)
	taker := r.seize(putSQL, "order.placed", 101, 200)
	locked := r.here()
	// These writers wait for the lock like everybody else.
	written := make(chan error, 1)
	writer := r.conn()
	go func() {
		for n := 201; n <= 300; n++ {
			if _, err := writer.Exec(t.Context(), putSQL, "order.placed", n, n); err != nil {
				written <- err
				return
			}
		}
		written <- nil
	}()
	eventually(t, "a mark has met the lock", func() bool { return x.logged("rows cannot be settled: trying again").Len() > 0 })
	r.pinned(locked)
	r.must(run(t.Context(), taker, "ALTER TABLE outbox_messages ADD COLUMN region text DEFAULT 'EU'; COMMIT"))
	r.must(<-written)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 300)

	// The next session meets the lock in its recovery scan, and so does a start: there is no other outbox to deliver meanwhile.
	meets := func(begins func(), rows int) {
		t.Helper()
		r.must(run(t.Context(), taker, "BEGIN; LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE"))
		begins()
		eventually(t, "the read-back has met the lock", func() bool {
			return x.logged("rows that were read back cannot be looked up: trying again").Len() > 0
		})
		r.must(run(t.Context(), taker, "COMMIT"))
		r.put(rows-9, rows)
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, rows)
	}
	meets(func() {
		r.exec(`SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
	}, 310)
	x.halt()
	r.rewind()
	meets(func() { x = r.start() }, 320)
}

// forgotten is a session that locks the row with a number and is then left open.
func (r *rig) forgotten(n int) *pgx.Conn {
	r.t.Helper()
	c := r.conn()
	r.must(run(r.t.Context(), c, fmt.Sprintf(`BEGIN; SELECT FROM outbox_messages WHERE payload ->> 'n' = '%d' FOR UPDATE`, n)))
	return c
}

// TestForgottenRowLock keeps one row locked over everything: the publisher stops when
// it has sent U messages from that row's on, a restart neither sends the row
// again nor runs ahead of it, and the lock's end sets everything free.
func TestForgottenRowLock(t *testing.T) {
	t.Parallel()
	// A cluster of its own: while a transaction is open no slot can be created.
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	x := r.start().streaming()
	r.keep()
	r.put(1, 10)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	r.put(11, 11)
	holder := r.forgotten(11)

	x = r.start().streaming()
	r.put(12, 20)
	r.pending(1) // the others flow
	after := r.here()
	if who := fmt.Sprint(x.alarmed("row_locked")["holder"]); !strings.HasPrefix(who, fmt.Sprintf("pid %d,", holder.PgConn().PID())) {
		t.Errorf("the alarm names %q, want pid %d", who, holder.PgConn().PID())
	}
	r.pinned(after)

	// From the locked row's message on, U messages and not one more.
	last := 10 + jetstream.U
	r.put(21, last+500)
	r.pending(501)
	r.storedIs(1, last)
	if got := x.Status().Unsettled; got != jetstream.U {
		t.Errorf("the publisher holds %d messages, want %d", got, jetstream.U)
	}

	for range 2 {
		x.halt()
		r.rewind()
		x = r.start().streaming()
		r.pinned(after)
		x.alarmed("row_locked") // by now a publisher that did not count the row would have sent the others
		if n := r.storedCount(); n != uint64(last) {
			t.Fatalf("stored %d messages, want %d as before", n, last)
		}
	}

	r.must(run(t.Context(), holder, "ROLLBACK"))
	r.pending(0)
	x.over("row_locked")
	r.passes(r.here())
	r.storedIs(1, last+500)
	x.quiet("events_lost", "foreign_message")
}

// TestStopWhileRowsAreLocked: a stop of the relay does not wait for locks, and what
// it leaves unmarked is marked by the next start.
func TestStopWhileRowsAreLocked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.keep()
	taker := r.seize(putSQL, "order.placed", 1, 200)
	eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 200 })
	after := r.here()
	x.halt()
	if r.confirmedPast(after) {
		t.Error("the LSN was confirmed past rows that are not marked")
	}
	r.must(run(t.Context(), taker, "COMMIT"))
	x = r.start().streaming()
	r.put(201, 210)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 210)
	x.quiet("events_lost", "nothing_to_compare")
}

// TestColumnChangesItsType: jsonb writes most rows otherwise than json did. Those are no
// losses.
func TestColumnChangesItsType(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`ALTER TABLE outbox_messages ALTER COLUMN payload TYPE json`)
	x := r.start().streaming()
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', n, 'order.placed', CASE WHEN n = 1 THEN '{"n": 1}' ELSE format('{"n":%s}', n) END::json FROM generate_series(1, 100) n`)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	r.exec(`ALTER TABLE outbox_messages ALTER COLUMN payload TYPE jsonb`)
	x = r.start().streaming()
	r.put(101, 101)
	r.pending(0)
	r.storedIs(1, 101)
	x.alarmed("rows_changed")
	x.quiet("events_lost")
}
