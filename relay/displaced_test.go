package relay_test

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestForeignMessageDisplacesARow: somebody publishes into the relay's stream, and of the
// messages that are under way one by one those behind it fit. What was refused is stored
// late, and the operator is told.
func TestForeignMessageDisplacesARow(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Stream.Batching = jetstream.BatchSingle
	x := r.start().streaming()
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	c := r.conn()
	const rows, rounds = 10_000, 10
	late, last := 0, 0
	for n := 1; n <= rounds*rows && late == 0; n += rows {
		before := r.storedCount()
		r.must(run(t.Context(), c, fmt.Sprintf(`BEGIN; INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n) FROM generate_series(%d, %d) n; COMMIT`, n, n+rows-1)))
		eventually(t, "some of it is stored", func() bool { return r.storedCount() > before+1000 })
		r.must(nc.Publish("events.order.placed", []byte(`{"n":0}`)))
		r.must(nc.Flush())
		r.pending(0)
		r.passes(r.here())
		seen := map[int]int{}
		for highest, numbers := 0, r.numbers(); len(numbers) > 0; numbers = numbers[1:] {
			if numbers[0] == 0 {
				continue
			}
			if seen[numbers[0]]++; numbers[0] < highest {
				late++
			}
			highest = max(highest, numbers[0])
		}
		last = n + rows - 1
		for i := 1; i <= last; i++ {
			if seen[i] != 1 {
				t.Fatalf("row %d is stored %d times", i, seen[i])
			}
		}
	}
	if late == 0 {
		t.Fatalf("no row of %d was displaced: the test shows nothing", last)
	}
	if f := x.alarmed("foreign_message"); f["writer"] != "a program that names no source" {
		t.Errorf("the alarm says %v", f)
	}
	// The order that the stream has now is what later sessions find.
	x.halt()
	r.start().streaming().quietBut("foreign_message")
	r.passes(r.here())
	if n, others := int(r.storedCount()), len(r.foreign()); n != last+others {
		t.Errorf("%d messages are stored, want %d rows and %d others", n, last, others)
	}
}

// foreign are the sequences of messages that are not the relay's.
func (r *rig) foreign() (seqs []uint64) {
	r.t.Helper()
	for _, m := range r.stored() {
		if m.Header.Get(nats.MsgIdHdr) == "" {
			seqs = append(seqs, m.Sequence)
		}
	}
	return seqs
}
