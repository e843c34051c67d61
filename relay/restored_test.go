package relay_test

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestServerRestoredOnItsTimeline: the server's data are put back to an older copy. What it
// commits from then on has lesser LSNs than the stream's last event, and is stored all the
// same; an alarm says what happened. A stored row that its WAL brings again is not sent again.
func TestServerRestoredOnItsTimeline(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
				r := newRig(t, pg)
				r.markWith(mark)
				put := func(n int) { r.put(n, n) }
				r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
				x := r.start().streaming()
				r.keep()
				put(1)
				r.passes(r.here())
				x.halt()
				copied := filepath.Join(t.TempDir(), "data")
				command := func(name string, args ...string) {
					if out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput(); err != nil {
						t.Fatalf("%s: %v: %s", name, err, out)
					}
				}
				r.must(pg.Stop(t.Context(), testenv.Fast))
				command("cp", "-a", pg.Dir(), copied)
				r.must(pg.Start(t.Context()))
				x = r.start().streaming()
				r.exec(`SELECT pg_logical_emit_message(true, 'noise', repeat('x', 1000000)) FROM generate_series(1, 3)`)
				for n := 2; n <= 5; n++ {
					put(n)
				}
				r.passes(r.here())
				x.halt()
				r.must(pg.Stop(t.Context(), testenv.Fast))
				command("rm", "-r", pg.Dir())
				command("mv", copied, pg.Dir())
				r.must(pg.Start(t.Context()))
				for n := 6; n <= 9; n++ {
					put(n)
				}
				r.rewind()
				r.duplicateWindowPasses(100 * time.Millisecond)
				x = r.start().streaming()
				x.alarmed("server_rolled_back")
				r.passes(r.here())
				if got := r.numbers(); !slices.Equal(got, span(1, 9)) {
					t.Errorf("stored %v, want 1 to 9", got)
				}
				x.halt()
				x = r.start().streaming()
				put(10)
				r.passes(r.here())
				if got := r.numbers(); !slices.Equal(got, span(1, 10)) {
					t.Errorf("stored %v, want 1 to 10", got)
				}
				x.quiet("server_rolled_back")
			})
		})
	}
}
