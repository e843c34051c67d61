package relay_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// TestConnectionClosedForGood: a server that takes smaller messages from now on tells
// nobody, and closes the connection at the first larger one, which the client then does
// not make anew. A relay that is started again knows the limit.
func TestConnectionClosedForGood(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 5)
	r.pending(0)
	r.must(r.nats.Limit(8 << 10))
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 1, 'order.placed', jsonb_build_object('pad', repeat('x', 20000)) FROM generate_series(1, 30) n`)
	short, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	select {
	case <-x.done:
	case <-short.Done():
		t.Fatal("the relay goes on without a connection")
	}
	if x.err == nil || !strings.Contains(x.err.Error(), "closed for good") {
		t.Errorf("the relay ended with %v", x.err)
	}
	r.start()
	eventually(t, "the large rows are parked", func() bool {
		return r.query1(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL`) == "30"
	})
	if n := r.storedCount(); n != 5 {
		t.Errorf("%d messages, want 5", n)
	}
}
