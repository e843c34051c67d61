package relay_test

import (
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// Two relays under load. One works, the other stands by, is ready, and takes
// over when the first is killed, or stopped and so silent with its connections
// open. A stopped one that goes on later cannot interleave: it finds its place
// taken and stands by.
func TestTwoRelays(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRigWith(t, pg, testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
		r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = window }) // which is not what keeps them apart
		l := newLedger(r)
		active := r.launch().awaitState("streaming")
		standby := r.launch().awaitState("standby")
		stop := l.start(load{writers: 2, rows: 10, pause: 50 * time.Millisecond})
		for range 2 {
			begun := r.fail(active, standby, active.kill)
			t.Logf("after SIGKILL the standby stores events %s later", begun)
			active, standby = standby, r.launch().awaitState("standby")

			begun = r.fail(active, standby, func() { r.must(active.signal(syscall.SIGSTOP)) })
			t.Logf("after SIGSTOP the standby stores events %s later", begun)
			// The server gives up on a silent relay after 10 s.
			if begun > 30*time.Second {
				t.Errorf("the standby took %s to take over", begun)
			}
			r.duplicateWindowPasses(2 * window)
			r.must(active.signal(syscall.SIGCONT))
			active.awaitState("standby")
			if state := standby.state(); state != "streaming" {
				t.Errorf("the relay that took over is %s after the other has come back", state)
			}
			active, standby = standby, active
		}
		stop()
		l.delivered()
		active.terminate()
		standby.awaitState("streaming")
		l.compare() // and it finds nothing to send
		standby.terminate()
	})
}

// fail has something done to the active relay and waits until the standby has
// taken over.
func (r *rig) fail(active, standby *process, act func()) time.Duration {
	r.t.Helper()
	before := r.storedCount()
	eventually(r.t, "the active relay stores events", func() bool { return r.storedCount() > before })
	if !standby.ready() || standby.state() != "standby" {
		r.t.Errorf("the second relay is %q, ready: %v", standby.state(), standby.ready())
	}
	act()
	begun := time.Now()
	standby.awaitState("streaming")
	before = r.storedCount()
	eventually(r.t, "the standby stores events", func() bool { return r.storedCount() > before })
	if !standby.ready() {
		r.t.Error("the relay that took over is not ready")
	}
	return time.Since(begun).Round(time.Millisecond)
}
