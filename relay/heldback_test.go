package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestHeldBackByAStandbySlot: the server sends nothing because a standby that has to
// have it first is not there. An operator hears of it, and nothing passes by.
func TestHeldBackByAStandbySlot(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		if pg.Version() < 17 {
			return // has no such setting
		}
		t.Parallel()
		r := newRig(t, pg)
		x := r.start().streaming()
		r.put(1, 3)
		r.pending(0)
		r.must(pg.Reload(t.Context(), map[string]string{"synchronized_standby_slots": "nobody"}))
		r.put(4, 6)
		x.alarmed("standby_slot")
		r.pending(3)
		r.must(pg.Reload(t.Context(), map[string]string{"synchronized_standby_slots": ""}))
		r.pending(0)
		r.storedIs(1, 6)
		x.over("standby_slot")
		x.quiet("missed_rows")
	})
}
