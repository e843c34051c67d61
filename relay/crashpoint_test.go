package relay_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// crashWindow is the stream's duplicate window: every crash lasts longer.
const crashWindow = time.Second

// cursedSQL is moveSQL, and one event in so many has a type whose subject the
// stream takes only at times.
const cursedSQL = `WITH account AS (UPDATE ledger SET n = n + $2 WHERE id = $1 RETURNING n)
	INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id, available_at)
	SELECT 1, 'account', $1, CASE WHEN random() < $3 THEN 'account.cursed' ELSE 'account.moved' END, '{}', g, now()
	FROM account, generate_series(account.n - $2 + 1, account.n) g ORDER BY g`

// curse writes with poison rows among the others, until the returned function is
// called.
func (l *ledger) curse(writers int, share float64, pause time.Duration) (stop func()) {
	return l.each(writers, func(ctx context.Context, c *pgx.Conn) error {
		_, err := c.Exec(ctx, cursedSQL, 1+rand.IntN(l.accounts), 1+rand.IntN(20), share)
		sleepUntil(ctx, pause)
		return err
	})
}

// moods has the stream take the poison at times, and at times not, until the
// returned function is called, after which it does.
func (r *rig) moods() (stop func()) {
	stream := func(subjects ...string) {
		s, err := r.js().Stream(context.Background(), "EVENTS")
		if err != nil {
			return // it comes back
		}
		cfg := s.CachedInfo().Config
		cfg.Subjects = subjects
		_, _ = r.js().UpdateStream(context.Background(), cfg)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			stream("events.account.moved")
			sleepUntil(ctx, 2*time.Second)
			stream("events.account.*")
			sleepUntil(ctx, time.Second)
		}
	}()
	end := sync.OnceFunc(func() {
		cancel()
		<-done
		stream("events.account.*")
	})
	r.t.Cleanup(end)
	return end
}

// crashed waits until the process has ended itself, and then for the duplicate
// window to pass.
func (p *process) crashed(place string) {
	p.t.Helper()
	eventually(p.t, "the relay crashes at "+place, p.ended)
	time.Sleep(crashWindow + 200*time.Millisecond)
}

// TestCrashPoints kills the relay at every step of what it does beside reading the
// WAL, each longer than the duplicate window, under a load with rows that fail for
// a while. Nothing is lost, nothing stored twice, nothing out of its order.
func TestCrashPoints(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		places []string
		env    []string
		most   int // a place is met up to so often before the crash
		before func(r *rig)
	}{
		"streaming": {places: []string{"listed", "proven", "polled", "stored", "marked", "failed", "parked", "holding", "held"}, most: 4},
		"polling": {
			places: []string{"listed", "proven", "polled", "stored", "marked", "failed", "parked", "holding", "held"},
			env:    []string{"WALPOST_MODE=poll"},
			most:   4,
		},
		"skipping": {
			places: []string{"listed", "polled", "stored", "failed", "parked"},
			env:    []string{"WALPOST_FALLBACK_ON_POISON=skip"},
			most:   4,
		},
		"slot": {
			places: []string{"dropped", "created", "polled", "marked", "answered", "renamed"},
			most:   1,
			before: func(r *rig) { r.dropSlot(r.cfg.Slot) },
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			clusters := testenv.Cluster
			if c.before != nil && testenv.Full(t) { // slots are another thing in every version
				clusters = testenv.Clusters
			}
			clusters(t, func(t *testing.T, pg *testenv.Postgres) {
				t.Parallel()
				r := newRig(t, pg)
				r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = crashWindow })
				l := newLedger(r)
				env := append([]string{"WALPOST_FALLBACK_BACKOFF=100ms", "WALPOST_FALLBACK_INTERVAL=500ms", "WALPOST_FALLBACK_MAX_ATTEMPTS=1000"}, c.env...)
				poison, settle := 0.0, func() {}
				if c.before == nil { // each of the stream's moods ends a session
					poison, settle = 0.02, r.moods()
				}
				stop := l.curse(4, poison, 80*time.Millisecond)
				for _, place := range testenv.Some(t, 3, c.places...) {
					if c.before != nil {
						c.before(r)
					}
					n := 1 + rand.IntN(c.most)
					p := r.launch(append(env, fmt.Sprintf("WALPOST_CRASH=%s:%d", place, n))...)
					p.crashed(place)
				}
				p := r.launch(env...)
				time.Sleep(time.Second)
				stop()
				settle()
				l.ended()
				l.rig.passesOver(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`)
				if name == "skipping" {
					l.compareBut("account.cursed")
				} else {
					l.compare()
				}
				p.terminate()
			})
		})
	}
}

// TestCrashAfterTheSlotIsMade: what a slot brings is noted before there is a slot, so that nothing is left to the
// table after it.
func TestCrashAfterTheSlotIsMade(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		l := newLedger(r)
		written := func() {
			if err := l.move(t.Context(), r.conn(), 20, 0); err != nil {
				t.Fatal(err)
			}
		}
		written()
		r.launch("WALPOST_CRASH=renamed:1").crashed("renamed")
		written()
		x := r.start().streaming()
		l.delivered()
		if n := x.logged("an outbox joins: its rows are delivered from the table first").Len(); n != 0 {
			t.Error("the outbox has to join although the slot has all its rows")
		}
		x.halt()
	})
}

// passesOver waits until a count is zero, as long as it falls.
func (r *rig) passesOver(count string) {
	r.t.Helper()
	for left := r.query1(count); left != "0"; {
		before := left
		eventually(r.t, "fewer are left than "+before, func() bool { left = r.query1(count); return len(left) < len(before) || left < before })
	}
}

// TestCrashWhileHealing kills the relay while it makes rows pending that the stream
// has lost, and while it delivers them.
func TestCrashWhileHealing(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		for _, place := range testenv.Some(t, 2, "unmarked:1", "unmarked:3", "polled:1", "polled:700") {
			t.Run(place, func(t *testing.T) {
				r := newRig(t, pg)
				r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = crashWindow })
				l := newLedger(r)
				p := r.launch().awaitState("streaming")
				stop := l.start(load{writers: 4, rows: 50, pause: 20 * time.Millisecond})
				eventually(t, "events are stored", func() bool { return r.storedCount() > 500 })
				p.terminate()
				restore := r.backup()
				p = r.launch().awaitState("streaming")
				before := r.storedCount()
				eventually(t, "more events are stored", func() bool { return r.storedCount() > before+2500 })
				p.terminate()
				restore()
				r.launch("WALPOST_CRASH=" + place).crashed(place)
				p = r.launch().awaitState("streaming")
				stop()
				l.delivered()
				p.terminate()
			})
		}
	})
}
