package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestInvisibleRowsAreSent: where the table is asked about a row that is flushed
// and not visible, for want of a synchronous standby, it does not have the row,
// and the row is not gone.
func TestInvisibleRowsAreSent(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.start().streaming().halt()
		r.synchronous("nosuch")
		committed := r.putBlocked(1, 10)
		x := r.start().streaming() // the stream is empty: the table decides about all there is
		eventually(t, "the invisible rows are stored", func() bool { return r.storedCount() == 10 })
		r.pinned(r.here())
		r.synchronous("")
		r.must(<-committed)
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, 10)
		x.halt()
		r.must(x.err)
	})
}
