package relay_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestConnectionClosedForGood: a server that takes smaller messages from now on tells
// nobody, and closes the connection at the first larger one. A client that reads why does
// not reconnect, and the relay ends; one that has only seen it break connects again and
// learns the limit, as does a relay that is started again.
func TestConnectionClosedForGood(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 5)
	r.pending(0)
	r.must(r.nats.Limit(8 << 10))
	insert := func(rows int) {
		r.exec(fmt.Sprintf(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', 1, 'order.placed', jsonb_build_object('pad', repeat('x', 20000)) FROM generate_series(1, %d) n`, rows))
	}
	parked := func() bool {
		return r.query1(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL`) != "0"
	}
	insert(1) // nothing is written behind it, so the client reads why
	eventually(t, "the relay ends, or has parked the row", func() bool {
		select {
		case <-x.done:
			return true
		default:
			return parked()
		}
	})
	if !parked() {
		if x.err == nil || !strings.Contains(x.err.Error(), "closed for good") {
			t.Errorf("the relay ended with %v", x.err)
		}
		r.start()
	}
	insert(29)
	eventually(t, "the large rows are parked", func() bool {
		return r.query1(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL`) == "30"
	})
	if n := r.storedCount(); n != 5 {
		t.Errorf("%d messages, want 5", n)
	}
}
