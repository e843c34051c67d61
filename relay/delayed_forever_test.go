package relay_test

import (
	"slices"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// TestDelayedForever: a row that is never due holds up nobody, and may get a time
// later on.
func TestDelayedForever(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.FallbackInterval = 100 * time.Millisecond
		r.exec(set{"available_at": `'infinity'`}.insert("outbox_messages", 3, canonicalRow))
		x := r.start().streaming()
		r.put(1, 2)
		r.pending(1)
		r.passes(r.here())
		r.exec(set{"available_at": `'infinity'`}.insert("outbox_messages", 100, set{"aggregate_type": `'account'`, "aggregate_id": "1", "event_type": `'account.reminded'`}))
		r.exec(remindSQL, 1, 10, 1.1, 2)
		eventually(t, "the others fall due", func() bool { return r.count(remindersPending) == 0 })
		r.reminded(10)
		r.exec(`UPDATE outbox_messages SET available_at = now() WHERE payload ->> 'n' = '3' AND aggregate_type = 'order'`)
		r.pending(1)
		if got := numbersOf(t, r.ofType("order.placed")); !slices.Equal(got, span(1, 3)) {
			t.Errorf("stored %v, want 1 to 3", got)
		}
		x.quiet("row_locked")
		if n := x.metric("walpost_sessions_total"); n != 0 {
			t.Errorf("%v sessions have ended", n)
		}
	})
}
