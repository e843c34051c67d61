package relay_test

import (
	"fmt"
	"slices"
	"testing"

	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

const (
	copied = 1000
	// moreThanAStep of the recovery scan is what a restored stream lacks.
	moreThanAStep = jetstream.U + 100
)

// rolledBack starts a relay on a stream that holds copied and lost messages. The function restore puts the
// copy in the place of the stream.
func rolledBack(t *testing.T, r *rig, lost int) (x *running, restore func()) {
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

// storedAgain wants the lost rows once more, in order and before any new one, and each aggregate in order. What comes of their
// aggregates before the last of them are marked is held, and others may overtake it.
func (r *rig) storedAgain(lost, upTo int) {
	r.t.Helper()
	r.marksAll()
	r.inOrder(upTo)
	if got := r.numbers(); len(got) < copied+lost || !slices.Equal(got[:copied+lost], span(1, copied+lost)) {
		r.t.Errorf("stored %s, want %d first, in order", brief(got), copied+lost)
	}
}

// marksAll waits until every row is marked, as long as more of them are.
func (r *rig) marksAll() {
	r.t.Helper()
	for left := r.unmarked(); left > 0; {
		before := left
		eventually(r.t, "more rows are marked", func() bool { left = r.unmarked(); return left < before })
	}
}

// TestRunningRelayLosesThousands: new rows come all the time.
func TestRunningRelayLosesThousands(t *testing.T) {
	t.Parallel()
	for _, mode := range testenv.Some(t, 1, relay.ModeAuto, relay.ModePoll) {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
			r.cfg.Mode = mode
			lost := testenv.Size(t, 3000, moreThanAStep)
			x, restore := rolledBack(t, r, lost)
			next := copied + lost
			put := func() { next++; r.exec(putAggregatesSQL, next, next) }
			restored := make(chan struct{})
			go func() { defer close(restored); restore() }()
			eventually(t, "alarm events_lost", func() bool { put(); return x.alarm("events_lost") != nil })
			<-restored
			for range 50 {
				put()
			}
			r.storedAgain(lost, next)
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
		const lost = moreThanAStep
		x, restore := rolledBack(t, r, lost)
		x.halt()
		restore()
		r.exec(putAggregatesSQL, copied+lost+1, copied+lost+100) // of the same and of other aggregates
		r.rewind()
		x = r.start().streaming()
		r.exec(putAggregatesSQL, copied+lost+101, copied+lost+200)
		r.passes(r.here())
		r.storedAgain(lost, copied+lost+200)
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
			lost := testenv.Size(t, 8000, moreThanAStep)
			x, restore := rolledBack(t, r, lost)
			x.halt()
			restore()
			next := copied + lost
			put := func() { r.exec(putAggregatesSQL, next+1, next+10); next += 10 }
			for _, place := range []string{
				fmt.Sprintf("unmarked:%d", testenv.Size(t, 2, 5)), "polled:1500", fmt.Sprintf("marked:%d", testenv.Size(t, 1, 3)),
			} {
				put()
				p := r.launch("WALPOST_MODE="+string(mode), "WALPOST_CRASH="+place)
				eventually(t, "the relay crashes at "+place, p.ended)
				r.duplicateWindowPasses(window)
				r.must(r.js().DeleteStream(t.Context(), "PROBE"))
			}
			some := r.storedCount() + 500
			p := r.launch("WALPOST_MODE=" + string(mode))
			eventually(t, "some more are stored, or all", func() bool { return r.storedCount() > some || r.unmarked() == 0 })
			p.kill()
			t.Logf("killed with %d messages stored", r.storedCount())
			put()
			if mode == relay.ModeAuto {
				r.rewind()
			}
			p = r.launch("WALPOST_MODE=" + string(mode))
			put()
			r.marksAll()
			r.inOrder(next) // of each aggregate: a killed relay's transaction may hold one of them up
			p.terminate()
		})
	}
}
