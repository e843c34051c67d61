package relay_test

import (
	"context"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// `pg_ctl stop -m fast` waits for a walsender until its client has confirmed all
// the WAL, or is gone. A relay that cannot confirm has to go, whatever it is
// doing: its presence must not be felt.
func TestFastShutdown(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRigWith(t, pg, testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
		l := newLedger(r)
		r.start().streaming().halt() // makes the slot: what is committed before is not in its WAL
		stop := l.start(load{writers: 4, rows: 10, pause: 50 * time.Millisecond, ahead: 1000})
		alone := r.shutDown()
		t.Logf("without a relay the server stops in %s", alone.Round(time.Millisecond))
		x := r.start()
		for _, s := range []struct {
			name         string
			before, then func()
		}{
			{name: "under load"},
			{"JetStream is gone", func() {
				r.must(r.nats.Kill())
				eventually(t, "the relay waits", func() bool { return x.Status().State == "waiting" })
			}, func() { r.must(r.nats.Start(t.Context())) }},
			{"JetStream is silent, and the relay does not know it yet", func() { r.silent(time.Second) }, r.resume},
			{"JetStream is silent, and the relay waits for what it has sent", func() { r.silent(7 * time.Second) }, r.resume},
			{"JetStream is silent, and the relay asks for the stream", func() { r.silent(17 * time.Second) }, r.resume},
		} {
			eventually(t, "the relay has a walsender", func() bool { return r.walsenders() == "1" })
			x.streaming()
			before := r.storedCount()
			eventually(t, "events are stored", func() bool { return r.storedCount() > before })
			if s.before != nil {
				s.before()
			}
			took := r.shutDown()
			t.Logf("%s: %s", s.name, took.Round(time.Millisecond))
			if took > alone+5*time.Second {
				t.Errorf("%s: the server stops in %s, without a relay in %s", s.name, took, alone)
			}
			if s.then != nil {
				s.then()
			}
		}
		eventually(t, "the relay has a walsender", func() bool { return r.walsenders() == "1" })
		x.streaming()
		stop()
		took := r.shutDown() // and when there is nothing to do
		t.Logf("idle: %s", took.Round(time.Millisecond))
		if took > alone+5*time.Second {
			t.Errorf("idle: the server stops in %s, without a relay in %s", took, alone)
		}
		l.delivered()
		x.halt()
		r.must(x.err)
	})
}

// shutDown restarts the server and says how long the stop took.
func (r *rig) shutDown() time.Duration {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), testenv.Patience)
	defer cancel()
	begun := time.Now()
	err := r.pg.Stop(ctx, testenv.Fast)
	took := time.Since(begun)
	if err != nil {
		r.t.Errorf("the server does not stop: %v", err)
		r.must(r.pg.Stop(r.t.Context(), testenv.Immediate))
	}
	r.must(r.pg.Start(r.t.Context()))
	return took
}

// walsenders is the number of those on the relay's slot.
func (r *rig) walsenders() string {
	r.t.Helper()
	return r.query1(`SELECT count(active_pid) FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
}

func (r *rig) silent(d time.Duration) {
	r.t.Helper()
	r.must(r.nats.Pause())
	time.Sleep(d)
}

func (r *rig) resume() { r.must(r.nats.Resume()) }
