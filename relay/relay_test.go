package relay_test

import (
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// TestRowReachesTheStream: one row that the relay finds in the table when it makes its
// slot, and one that the WAL brings.
func TestRowReachesTheStream(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.put(1, 1)
		x := r.start().streaming()
		begun := time.Now()
		r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES (7, 'order', 42, 'order.created', '{"n": 2, "a": [true, null]}')`)
		r.pending(0)
		got := r.stored()
		if len(got) != 2 {
			t.Fatalf("stored %d messages, want 2", len(got))
		}
		t.Log(got[1].Subject, got[1].Header, string(got[1].Data))
		if s := got[1].Subject; s != "events.order.created" {
			t.Errorf("the subject is %s", s)
		}
		eventually(t, "both are counted", func() bool { return x.metric("outbox_throughput_total") == 2 })
		// When the first one was committed nobody knows.
		count, seconds := x.histogram("walpost_commit_to_ack_seconds")
		if took := time.Since(begun).Seconds(); count != 1 || seconds <= 0 || seconds > took {
			t.Errorf("from commit to PubAck: %d events in %f s, want 1 within %f s", count, seconds, took)
		}
		x.halt()
		if x.err != nil {
			t.Fatal(x.err)
		}
		if n := x.metric("outbox_throughput_total"); n != 2 {
			t.Errorf("%v events are counted, want 2", n)
		}
	})
}
