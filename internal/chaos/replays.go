package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/walpost/walpost/internal/e2e/audit"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// requestReplays has the events of an aggregate published again, now and then, until ctx is done.
func (l *load) requestReplays(ctx context.Context, rng *rand.Rand) {
	for sleep.For(ctx, between(rng, time.Second, 4*time.Second)) && !l.done() {
		try, cancel := context.WithTimeout(ctx, 10*time.Second)
		_ = l.w.exec(try, `INSERT INTO outbox_replays (slot, outbox, aggregate_type, aggregate_id)
			VALUES ($1, 'public.outbox_messages', 'account', $2::int::text)`, slotName, rng.IntN(aggregates))
		cancel()
	}
}

// replayCounts are the messages of each request, and how many are there a second time.
type replayCounts struct {
	rows     map[outbox.MessageID]bool
	messages map[int64]int64
	twice    int
}

func newReplayCounts() *replayCounts {
	return &replayCounts{rows: map[outbox.MessageID]bool{}, messages: map[int64]int64{}}
}

func (c *replayCounts) add(m audit.Message) {
	if c.rows[m.ID] {
		c.twice++
		return
	}
	c.rows[m.ID] = true
	c.messages[m.ID.Request]++
}

// replaysEnd waits until no request is open.
func (w *world) replaysEnd(ctx context.Context) error {
	return w.until(ctx, "replays have ended", func(ctx context.Context) error {
		var open int
		err := w.query(ctx, `SELECT count(*)::int FROM outbox_replays
			WHERE state IN ('requested', 'running')`, nil, &open)
		if err == nil && open > 0 {
			err = fmt.Errorf("%d requests are open", open)
		}
		return err
	})
}

// checkReplays holds the messages of each request against what the database says of it. Where the broker was
// rolled back, or the requests may have been, neither has all.
func (w *world) checkReplays(ctx context.Context, c *replayCounts, r *result) error {
	if w.rollback || w.promoted.Load() {
		return nil
	}
	r.Duplicated += c.twice
	conn, err := w.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx)) //nolint:errcheck // it has only read
	rows, err := conn.Query(ctx, `SELECT replay_id, state, sent FROM outbox_replays ORDER BY 1`)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id, sent int64
		var state string
		if err := rows.Scan(&id, &state, &sent); err != nil {
			return err
		}
		r.Replays++
		// A row that was published before a crash and is not in the table any more is not counted.
		n := c.messages[id]
		more := n > sent && r.Faults["ids reused"] == 0
		if state != "done" || n < sent || more {
			moment := fmt.Sprintf("replay %d is %s: %d rows sent, %d messages", id, state, sent, n)
			r.Moments = append(r.Moments, moment)
		}
	}
	return rows.Err()
}
