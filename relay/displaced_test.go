package relay_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestForeignMessageDisplacesARow: somebody publishes into the relay's stream, and of the
// messages that are under way one by one those behind it fit. What was refused is stored
// late, also where no table knows of it, and the operator is told.
func TestForeignMessageDisplacesARow(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkNone, outbox.MarkUpdate} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Outboxes[0].Mark = mark
			r.cfg.Stream.Batching = jetstream.BatchSingle
			x := r.start().streaming()
			nc, err := nats.Connect(r.nats.URL())
			r.must(err)
			defer nc.Close()
			c := r.conn()
			forget := map[outbox.Mark]string{outbox.MarkNone: "DELETE FROM outbox_messages;"}[mark]
			const rows, rounds = 10_000, 10
			late, last := 0, 0
			for n := 1; n <= rounds*rows && late == 0; n += rows {
				before := r.storedCount()
				r.must(run(t.Context(), c, fmt.Sprintf(`BEGIN; INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
					SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n) FROM generate_series(%d, %d) n; %s COMMIT`, n, n+rows-1, forget)))
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
		})
	}
}

// TestRowsAreSkippedInTheStream: where a foreign message is near the tail, rows without marks that lie below
// the tail and are not in the stream are sent late. A dead letter is not sent.
func TestRowsAreSkippedInTheStream(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Outboxes[0].Mark = outbox.MarkNone
	r.createStream(func(c *natsjs.StreamConfig) {
		c.Subjects, c.Duplicates = []string{"events.order.>"}, 100*time.Millisecond
	})
	r.publish(1, func(int, nats.Header) {})
	x := r.start().streaming()
	r.keep()
	for n := 1; n <= 3; n++ {
		r.putNone(n)
	}
	refused := set{"event_type": "'payment.made'"}
	r.exec(refused.insert("outbox_messages", 100, canonicalRow) + "; DELETE FROM outbox_messages")
	r.putNone(4)
	r.passes(r.here())
	r.storedIs(0, 4)
	const letters = `SELECT count(*) FROM outbox_messages_dlq`
	if n := r.query1(letters); n != "1" {
		t.Fatalf("%s dead letters, want 1", n)
	}
	x.halt()

	r.loseMessages(2, 4) // rows 1 and 3
	r.setSubjects("events.>")
	r.rewind()
	r.duplicateWindowPasses(100 * time.Millisecond)
	r.must(r.js().DeleteStream(t.Context(), "PROBE"))
	r.start().streaming()
	r.putNone(5)
	r.passes(r.here())
	r.storedIs(0, 0, 2, 2, 4, 4, 1, 1, 3, 3, 5, 5)
	if n := r.query1(letters); n != "1" {
		t.Errorf("%s dead letters, want 1", n)
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
