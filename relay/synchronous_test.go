package relay_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// With synchronous_standby_names = '*' the server counts the relay among its
// standbys: a commit waits for the relay's confirmation, which waits for a mark,
// which waits until the commit is visible. The relay says so and lets go of the
// slot, whether it starts like this or is overtaken by it.
func TestCountedAsSynchronous(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"at the start", "while it streams"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
				t.Parallel()
				r := newRig(t, pg)
				x := r.start().streaming()
				r.put(1, 10)
				r.pending(0)
				if when == "at the start" {
					x.halt()
				}
				r.synchronous("*")
				if when == "at the start" {
					x = r.start()
				}
				committed := r.putBlocked(11, 20)
				x.alarmed("synchronous")
				r.synchronous("")
				r.must(<-committed)
				x.streaming()
				r.pending(0)
				r.storedIs(1, 20)
				r.passes(r.here())
				x.halt()
				r.must(x.err)
			})
		})
	}
}

// TestInvisibleRows: a synchronous standby that is not there. Commits are flushed, and so decoded, but not visible. Their
// events are stored; rows are marked when they come to be seen, not before, and only then confirmed. A journal has its entries
// before: they lie behind the rows in the WAL. Whatever becomes of the relay until then, no event is stored twice, which must
// not be the duplicate window's doing.
func TestInvisibleRows(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
				t.Parallel()
				r := newRig(t, pg)
				r.markWith(mark)
				r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
				x := r.start().streaming()
				r.put(1, 10)
				r.pending(0)
				r.synchronous("nosuch")
				committed := r.putBlocked(11, 20)
				eventually(t, "the invisible rows are stored", func() bool { return r.storedCount() == 20 })
				if n := r.query1(`SELECT count(*) FROM outbox_messages`); n != "10" {
					t.Fatalf("%s rows are visible, want 10", n)
				}
				for range 2 {
					x.halt()
					r.must(x.err)
					r.duplicateWindowPasses(100 * time.Millisecond)
					x = r.start().streaming()
					if mark != outbox.MarkJournal {
						r.pinned(r.here())
					}
					r.storedIs(1, 20)
				}
				r.synchronous("")
				r.must(<-committed)
				r.pending(0)
				r.passes(r.here())
				r.storedIs(1, 20)
				x.quiet("synchronous", "events_lost", "nothing_to_compare")
				x.halt()
				r.must(x.err)
			})
		})
	}
}

// synchronous sets synchronous_standby_names. Commits go by what the checkpointer
// makes of it, which it does before it answers.
func (r *rig) synchronous(names string) {
	r.t.Helper()
	r.must(r.pg.Reload(r.t.Context(), map[string]string{"synchronous_standby_names": names}))
	r.exec(`CHECKPOINT`)
}

// putBlocked commits events one by one, each in a session of its own that waits
// for a synchronous standby, in their order. The channel tells the first error
// when all have returned.
func (r *rig) putBlocked(from, to int) <-chan error {
	r.t.Helper()
	done := make(chan error, 1)
	results := make(chan error, to-from+1)
	for n := from; n <= to; n++ {
		c := r.conn()
		go func() {
			_, err := c.Exec(context.Background(), putSQL, "order.placed", n, n)
			results <- err
		}()
		eventually(r.t, fmt.Sprintf("the commit of event %d waits", n), func() bool {
			return r.query1(`SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep'`, c.PgConn().PID()) == "1"
		})
	}
	go func() {
		var first error
		for range to - from + 1 {
			if err := <-results; first == nil {
				first = err
			}
		}
		done <- first
	}()
	return done
}
