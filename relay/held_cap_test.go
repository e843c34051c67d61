package relay_test

import (
	"context"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// someCursedSQL is moveSQL, and one event in ten is of a type that the stream does not take.
const someCursedSQL = `WITH account AS (UPDATE ledger SET n = n + $2 WHERE id = $1 RETURNING n)
	INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id)
	SELECT 1, 'account', $1, CASE WHEN random() < 0.1 THEN 'account.cursed' ELSE 'account.moved' END, '{}', g
	FROM account, generate_series(account.n - $2 + 1, account.n) g ORDER BY g`

// TestHeldPastTheCap: more aggregates are held than the relay remembers, so that it forgets some and
// asks the table about them, while events of all of them are committed, fail and are tried again. The
// order holds over restarts, and in the end nothing is held.
func TestHeldPastTheCap(t *testing.T) {
	t.Cleanup(relay.SetMostHeld(4)) // a variable of the package: nothing else runs beside the two
	for name, mode := range map[string]relay.Mode{"streaming": relay.ModeAuto, "polling": relay.ModePoll} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.account.moved"} })
			r.cfg.Mode, r.cfg.FallbackInterval = mode, 100*time.Millisecond
			r.cfg.Retry = table.Retry{Backoff: 50 * time.Millisecond, MaxAttempts: 10_000}
			l := newLedger(r)
			r.exec(`INSERT INTO ledger SELECT g FROM generate_series(17, 60) g`)
			l.accounts = 60
			x := r.start()
			// The writers may be faster than the relay, which asks the table about most rows. What they
			// write in a round is bounded, and more than the round waits for.
			var left atomic.Int64
			stop := l.each(3, func(ctx context.Context, c *pgx.Conn) error {
				sleepUntil(ctx, time.Millisecond)
				rows := 1 + rand.Int64N(4)
				if left.Load() < rows {
					return nil
				}
				left.Add(-rows)
				_, err := c.Exec(ctx, someCursedSQL, 1+rand.IntN(l.accounts), rows)
				return err
			})
			round := func() {
				enough := l.committed() + 200
				left.Add(800)
				l.reaches(enough)
			}
			for range 3 {
				round()
				eventually(t, "more aggregates are held than are remembered", func() bool { return x.metric("walpost_held_aggregates") > 20 })
				x.halt()
				x = r.startAtWork()
			}
			r.setSubjects("events.account.moved", "events.account.cursed")
			round()
			stop()
			l.delivered()
			eventually(t, "every hold has ended", func() bool { return x.metric("walpost_held_aggregates") == 0 })
			r.exec(moveSQL, 1, 100, 0) // nothing is asked of the table any more
			l.delivered()
			x.halt()
		})
	}
}
