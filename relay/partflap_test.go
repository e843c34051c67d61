package relay_test

import (
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

const (
	detachA = `ALTER TABLE outbox_messages DETACH PARTITION outbox_a`
	attachA = `ALTER TABLE outbox_messages ATTACH PARTITION outbox_a FOR VALUES IN ('a')`
)

// reads waits until the session of a relay has its slot.
func (r *rig) reads() {
	r.t.Helper()
	eventually(r.t, "the slot is read", func() bool {
		return r.query1(`SELECT bool_or(active)::text FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot) == "true"
	})
}

// TestPartitionAwayInTheReadBack: all rows are stored and marked. A partition is away while a session reads the stream back,
// and is there again when marks and stream are compared.
func TestPartitionAwayInTheReadBack(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.partition()
	x := r.start().streaming()
	n := 0
	for _, away := range []time.Duration{300 * time.Millisecond, 500 * time.Millisecond, 700 * time.Millisecond} {
		r.exec(`INSERT INTO outbox_messages (region, aggregate_type, aggregate_id, event_type, payload)
			SELECT CASE WHEN n / 100 % 2 = 0 THEN 'a' ELSE 'b' END, 'order', 1, 'order.placed', jsonb_build_object('n', n)
			FROM generate_series($1::int, $2::int) n ORDER BY n`, n+1, n+10_000)
		n += 10_000
		r.pending(0)
		r.passes(r.here())
		x.halt()
		x = r.start()
		r.reads()
		r.exec(detachA)
		time.Sleep(away)
		r.exec(attachA)
		x.streaming()
		r.pending(0)
		r.passes(r.here())
		x.quiet("events_lost")
	}
	if got := r.storedCount(); got != uint64(n) {
		t.Errorf("stored %d, want %d", got, n)
	}
	x.halt()
}

// TestPartitionAwayTwice: rows are stored and not marked. Their partition is away while a relay runs, and once more while the
// next one begins.
func TestPartitionAwayTwice(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.partition()
			r.cfg.Outboxes[0].Mark, r.cfg.FallbackInterval = mark, 200*time.Millisecond
			p := r.launch("WALPOST_MARK=" + string(mark)).awaitState("streaming")
			r.put(1, 10)
			r.pending(0)
			holder := r.seize(putSQL, "order.placed", 11, 20)
			eventually(t, "the rows are stored", func() bool { return r.storedCount() == 20 })
			p.kill()
			r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'walpost' AND datname = current_database()`)
			r.must(run(t.Context(), holder, detachA))
			r.must(run(t.Context(), holder, `COMMIT`))
			r.duplicateWindowPasses(moveWindow)
			x := r.start().streaming()
			r.passes(r.here())
			x.halt()
			r.exec(attachA)
			x = r.start()
			r.reads()
			r.exec(detachA)
			x.streaming()
			r.exec(`INSERT INTO outbox_messages (region, aggregate_type, aggregate_id, event_type, payload) VALUES ('b', 'order', 2, 'order.placed', '{"n": 500}')`)
			eventually(t, "row 500 is stored", func() bool { return r.storedCount() == 21 })
			r.exec(attachA)
			r.put(21, 25)
			r.pending(0)
			r.passes(r.here())
			r.storedIs(1, 20, 500, 500, 21, 25)
			x.halt()
		})
	}
}
