package relay_test

import (
	"strings"
	"testing"
	"time"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
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

// TestInvisibleRowsAndOthersIDs: rows are stored and not visible, and another writer publishes more ids behind them than a start remembers.
// It waits until the rows are visible, and does not send them again.
func TestInvisibleRowsAndOthersIDs(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.Source = "shop"
		r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
		x := r.start().streaming()
		r.synchronous("nosuch")
		committed := r.putBlocked(1, 10)
		eventually(t, "the invisible rows are stored", func() bool { return r.storedCount() == 10 })
		x.halt()
		const others = 5 * jetstream.U
		r.flood("shop", others)
		r.duplicateWindowPasses(200 * time.Millisecond)
		x = r.start()
		eventually(t, "the start waits", func() bool { return strings.HasPrefix(x.Status().Step, "wait for open transactions") })
		r.synchronous("")
		r.must(<-committed)
		x.streaming()
		r.pending(0)
		r.passes(r.here())
		x.halt()
		if got := r.storedCount(); got != 10+others {
			t.Errorf("the stream has %d messages, want %d", got, 10+others)
		}
	})
}

// TestInvisibleRowsWhilePolling: rows are stored and not visible. A relay that polls delivers many others, and starts again, before they are.
func TestInvisibleRowsWhilePolling(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.createStream(func(s *natsjs.StreamConfig) { s.Duplicates = 100 * time.Millisecond })
		x := r.start().streaming()
		r.synchronous("nosuch")
		committed := r.putBlocked(1, 10)
		eventually(t, "the invisible rows are stored", func() bool { return r.storedCount() == 10 })
		x.halt()
		r.cfg.Mode = relay.ModePoll
		c := r.conn()
		const others = 3*jetstream.U + 1000
		r.must(run(t.Context(), c, `SET synchronous_commit = local`))
		_, err := c.Exec(t.Context(), putSQL, "order.placed", 11, 10+others)
		r.must(err)
		for range 3 {
			x = r.start()
			r.pending(0) // of those that are visible
			eventually(t, "the others are stored", func() bool { return r.storedCount() >= 10+others })
			x.halt()
		}
		r.duplicateWindowPasses(200 * time.Millisecond)
		r.synchronous("")
		r.must(<-committed)
		x = r.start()
		r.pending(0)
		x.halt()
		if got := r.storedCount(); got != 10+others {
			t.Errorf("the stream has %d messages, want %d", got, 10+others)
		}
	})
}
