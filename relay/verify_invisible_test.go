package relay_test

import (
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/verify"
)

// TestVerifyWaitsForInvisibleRows: where commits wait for a synchronous standby, rows
// come to be seen long after their messages, and are marked at once.
func TestVerifyWaitsForInvisibleRows(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		for name, plan := range map[string]func(r *rig, c *verify.Config, show func()){
			"until they are marked, before they are listed": func(_ *rig, c *verify.Config, show func()) {
				n, phantom := 0, c.Phantom
				c.Phantom = func(p outbox.Position) bool {
					if n++; n == 20 { // the rows of all messages have been looked for
						show()
					}
					return phantom(p)
				}
			},
			"until their transactions have ended": func(_ *rig, _ *verify.Config, show func()) {
				go func() {
					time.Sleep(3 * time.Second) // it has come to the messages without a row, and waits for transactions
					show()
				}()
			},
		} {
			t.Run(name, func(t *testing.T) {
				r := newRig(t, pg)
				x := r.start().streaming()
				r.put(1, 10)
				r.pending(0)
				r.synchronous("nosuch")
				committed := r.putBlocked(11, 20)
				eventually(t, "the invisible rows are stored", func() bool { return r.storedCount() == 20 })
				shown := make(chan struct{})
				report := r.verify(func(c *verify.Config) {
					plan(r, c, func() {
						defer close(shown)
						r.synchronous("")
						r.must(<-committed)
						r.pending(0)
					})
				})
				r.finds(report, nil)
				<-shown
				if report.Messages != 20 {
					t.Errorf("%d messages were compared, want 20", report.Messages)
				}
				x.halt()
			})
		}
	})
}
