package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestMoveToAppendOnly: a running system moves to outbox_events and back, under load. The relay reads both tables meanwhile.
// Every event is stored once, and those of an aggregate in their order.
func TestMoveToAppendOnly(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		old := r.cfg.Outboxes[0]
		events := &outbox.Table{Schema: "public", Name: outbox.AppendTable, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal}
		x := r.start().streaming()
		var into atomic.Value
		into.Store(old.Name)
		written, stop := r.eachNumbered(4, &into)
		wait := func() {
			t.Helper()
			from := written.Load()
			eventually(t, "more is written", func() bool { return written.Load() >= from+500 })
		}
		wait()

		r.migrate(old, events) // and the publication, which a start completes
		x.halt()
		r.exec(`ALTER PUBLICATION walpost ADD TABLE outbox_events`)
		r.cfg.Outboxes = []*outbox.Table{old, events}
		x = r.start().streaming()
		wait()
		into.Store(events.Name)
		wait()
		x.halt()
		x = r.start()
		wait()
		eventually(t, "nothing is pending in outbox_messages", func() bool { return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == 0 })
		x.halt()
		r.cfg.Outboxes = []*outbox.Table{events}
		x = r.start()
		wait()

		x.halt()
		r.cfg.Outboxes = []*outbox.Table{old, events}
		x = r.start().streaming()
		into.Store(old.Name)
		wait()
		stop()
		eventually(t, "everything is stored", func() bool { return int(r.storedCount()) >= int(written.Load()) })
		x.halt()
		r.numbered(4, int(written.Load()))
	})
}

// eachNumbered has writers insert events into a table, each with an aggregate and numbers of its own.
func (r *rig) eachNumbered(writers int, into *atomic.Value) (written *atomic.Int64, stop func()) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var all sync.WaitGroup
	written = new(atomic.Int64)
	for w := range writers {
		conn := r.conn()
		all.Go(func() {
			for n := 1; ctx.Err() == nil; n += 3 {
				_, err := conn.Exec(context.Background(), fmt.Sprintf(`INSERT INTO %s (aggregate_type, aggregate_id, event_type, payload)
					SELECT 'order', %d, 'order.placed', jsonb_build_object('w', %[2]d, 'n', n) FROM generate_series(%d, %[3]d + 2) n ORDER BY n`,
					into.Load(), w, n))
				if err != nil {
					r.t.Error(err)
					return
				}
				written.Add(3)
				time.Sleep(2 * time.Millisecond)
			}
		})
	}
	stop = func() { cancel(); all.Wait() }
	r.t.Cleanup(stop)
	return written, stop
}

// numbered wants the writers' events in the stream: all of them, once, in their order.
func (r *rig) numbered(writers, events int) {
	r.t.Helper()
	last := make([]int, writers)
	all := r.stored()
	for _, m := range all {
		var body struct{ W, N int }
		r.must(json.Unmarshal(m.Data, &body))
		if body.N != last[body.W]+1 {
			r.t.Errorf("sequence %d has event %d of writer %d, behind %d", m.Sequence, body.N, body.W, last[body.W])
		}
		last[body.W] = body.N
	}
	if len(all) != events {
		r.t.Errorf("%d messages are stored, and %d events were written", len(all), events)
	}
}
