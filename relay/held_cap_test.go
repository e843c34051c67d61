package relay_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
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

// TestRecordedBeforeItsPredecessors: a session has ended after it had recorded the failure of a row, and before earlier ones of its
// aggregate were stored. What it had failed for is over: the earlier ones come first.
func TestRecordedBeforeItsPredecessors(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]relay.Mode{"streaming": relay.ModeAuto, "polling": relay.ModePoll} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode, r.cfg.FallbackInterval = mode, 100*time.Millisecond
			x := r.start().working(mode)
			r.put(1, 3)
			r.pending(0)
			x.halt()
			r.put(4, 9)
			r.exec(`UPDATE outbox_messages SET attempts = 1, last_error = 'it was refused', available_at = now() WHERE id IN (6, 9)`)
			c := r.conn()
			r.must(run(t.Context(), c, `BEGIN; SELECT FROM outbox_messages WHERE id = 4 FOR UPDATE`)) // it cannot be recorded
			r.start().working(mode)
			for n := 10; n < 15; n++ { // passes
				r.exec(strings.Replace(putSQL, "'order', 1", "'order', 2", 1), "order.placed", n, n)
				eventually(t, "a row of another aggregate is stored", func() bool { return slices.Contains(r.numbers(), n) })
				time.Sleep(200 * time.Millisecond)
			}
			r.must(run(t.Context(), c, `ROLLBACK`))
			eventually(t, "all rows are stored", func() bool { return r.storedCount() >= 14 })
			of := slices.DeleteFunc(r.numbers(), func(n int) bool { return n > 9 })
			if !slices.Equal(of, []int{1, 2, 3, 4, 5, 6, 7, 8, 9}) {
				t.Errorf("stored %v", of)
			}
		})
	}
}
