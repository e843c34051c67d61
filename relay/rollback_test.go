package relay_test

import (
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// A stream that is restored from a copy lacks more than a step of the recovery scan.
const (
	copied = 1000
	lost   = jetstream.U + 2000
)

// rolledBack is a rig with a stream that held copied and lost, and a function that
// puts the copy in its place.
func rolledBack(t *testing.T, r *rig) (x *running, restore func()) {
	t.Helper()
	r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = window })
	x = r.startAtWork()
	if x.Status().State == "streaming" {
		r.keep()
	}
	r.put(1, copied)
	r.pending(0)
	restore = r.backup()
	r.put(copied+1, copied+lost)
	r.pending(0)
	x.quietBut()
	return x, restore
}

// storedAgain wants the lost rows once more, before the new ones, and in order.
func (r *rig) storedAgain(upTo int) {
	r.t.Helper()
	for left := r.unmarked(); left > 0; {
		before := left
		eventually(r.t, "more rows are marked", func() bool { left = r.unmarked(); return left < before })
	}
	r.storedIs(1, upTo)
}

// TestRunningRelayLosesThousands: new rows come all the time.
func TestRunningRelayLosesThousands(t *testing.T) {
	t.Parallel()
	for _, mode := range testenv.Some(t, 1, relay.ModeAuto, relay.ModePoll) {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
			r.cfg.Mode = mode
			x, restore := rolledBack(t, r)
			next := copied + lost
			put := func() { next++; r.exec(putAggregatesSQL, next, next) }
			restored := make(chan struct{})
			go func() { defer close(restored); restore() }()
			eventually(t, "alarm events_lost", func() bool { put(); return x.alarm("events_lost") != nil })
			<-restored
			for range 50 {
				put()
			}
			r.storedAgain(next)
			r.saysLost(x, copied+1, copied+lost)
			x.quietBut("stream_rolled_back", "events_lost")
			if n := x.metric("walpost_missed_rows_total"); n != 0 {
				t.Errorf("%v rows were missed", n)
			}
		})
	}
}

// TestStoppedRelayLosesThousands, and the server has forgotten what was confirmed.
func TestStoppedRelayLosesThousands(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		x, restore := rolledBack(t, r)
		x.halt()
		restore()
		r.exec(putAggregatesSQL, copied+lost+1, copied+lost+100) // of the same and of other aggregates
		r.rewind()
		x = r.start().streaming()
		r.exec(putAggregatesSQL, copied+lost+101, copied+lost+200)
		r.storedAgain(copied + lost + 200)
		r.passes(r.here())
		r.storedIs(1, copied+lost+200)
		r.saysLost(x, copied+1, copied+lost)
		x.quietBut("events_lost")
	})
}

// TestKilledWhileHealing: the relay crashes when it has made some of the rows
// pending again, when it has sent some of them, and at any time.
func TestKilledWhileHealing(t *testing.T) {
	t.Parallel()
	for _, mode := range testenv.Some(t, 1, relay.ModeAuto, relay.ModePoll) {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode = mode
			x, restore := rolledBack(t, r)
			x.halt()
			restore()
			next := copied + lost
			put := func() { r.exec(putAggregatesSQL, next+1, next+10); next += 10 }
			for _, place := range []string{"unmarked:5", "polled:3000", "marked:3"} {
				put()
				p := r.launch("WALPOST_MODE="+string(mode), "WALPOST_CRASH="+place)
				eventually(t, "the relay crashes at "+place, p.ended)
				r.duplicateWindowPasses(window)
				r.must(r.js().DeleteStream(t.Context(), "PROBE"))
			}
			p := r.launch("WALPOST_MODE=" + string(mode))
			some := r.storedCount() + 2000
			eventually(t, "some more are stored", func() bool { return r.storedCount() > some })
			p.kill()
			t.Logf("killed with %d messages stored", r.storedCount())
			put()
			if mode == relay.ModeAuto {
				r.rewind()
			}
			p = r.launch("WALPOST_MODE=" + string(mode))
			put()
			r.storedAgain(next)
			p.terminate()
		})
	}
}
