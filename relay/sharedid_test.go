package relay_test

import (
	"slices"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// TestRowsThatShareAnID: in a partitioned table two rows may have the same id. Each is delivered once.
func TestRowsThatShareAnID(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.partition()
	r.cfg.Mode, r.cfg.FallbackInterval = relay.ModePoll, 100*time.Millisecond
	x := r.startAtWork()
	r.exec(`INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload, region)
		SELECT n % 5, 'order', n, 'order.placed', jsonb_build_object('n', n), CASE WHEN n < 5 THEN 'a' ELSE 'b' END FROM generate_series(0, 9) n`)
	r.pending(0)
	got := r.numbers()
	slices.Sort(got)
	if brief(got) != "[0-9]" {
		t.Errorf("stored %s, want each of [0-9] once", brief(got))
	}
	x.halt()
	if n := x.metric("walpost_sessions_total"); n != 0 {
		t.Errorf("%v sessions have ended", n)
	}
	x.quiet("events_lost")
}
