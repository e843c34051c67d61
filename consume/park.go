package consume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Events that a handler failed at are rows of consumer_parked. Only the partition's owner tries them again.

const parkSQL = `INSERT INTO {parked} (consumer_name, partition_hash, aggregate, sequence,
		event_source, event_id, event_type, event, attempts, last_error, next_attempt_at, dead_at)
	VALUES ($1::text, $2::bigint, $3::bytea, $4::bigint, $5::text, $6::text, $7::text, $8::bytea,
		$9::integer, $10::text, pg_catalog.now() + $11::text::interval,
		CASE WHEN $12::boolean THEN pg_catalog.now() END)`

// park keeps the event, and goes on behind it.
func (p *partition) park(ctx context.Context, e Event, failed error) error {
	c, err := p.begin(ctx, nil)
	if err != nil {
		return err
	}
	defer c.end()
	if err := c.keep(ctx, e, failed); err != nil {
		return err
	}
	s := step{
		offset: e.Sequence, anchor: e.anchor(),
		ids: []string{e.seenID(p.Name)}, times: []string{timeText(e.StoredAt)},
	}
	if err := c.finish(ctx, s); err != nil {
		return err
	}
	dead := p.MaxAttempts == 1
	if name := e.aggregate(); name != "" && !dead && !p.SkipPoison {
		p.waiting[name] = true
	}
	p.settled(nil, nil)
	p.reportFailure(ctx, e, failed, dead)
	return nil
}

// parkBehind keeps events whose aggregate waits.
func (p *partition) parkBehind(ctx context.Context, events []Event) error {
	ids := make([]string, len(events))
	for i := range events {
		ids[i] = events[i].seenID(p.Name)
	}
	c, err := p.begin(ctx, ids)
	if err != nil {
		return err
	}
	defer c.end()
	last := events[len(events)-1]
	s := step{offset: last.Sequence, anchor: last.anchor()}
	for i, e := range events {
		if c.seen[ids[i]] {
			continue
		}
		c.seen[ids[i]] = true
		if err := c.keep(ctx, e, nil); err != nil {
			return err
		}
		s.ids, s.times = append(s.ids, ids[i]), append(s.times, timeText(e.StoredAt))
	}
	if err := c.finish(ctx, s); err != nil {
		return err
	}
	p.settled(nil, nil)
	return nil
}

// keep inserts the event. Without an error it waits behind another one.
func (c *claim) keep(ctx context.Context, e Event, failed error) error {
	text, err := json.Marshal(e)
	if err != nil {
		return fmt.Errorf("encode event: %w", err)
	}
	var aggregate []byte
	if name := e.aggregate(); name != "" {
		aggregate = []byte(name)
	}
	attempts, reason, pause := 0, any(nil), time.Duration(0)
	if failed != nil {
		attempts, reason, pause = 1, errorText(failed), c.backoff(1)
	}
	err = c.query(ctx, c.sql(parkSQL), []any{
		c.Name, int64(e.hash()), aggregate, int64(e.Sequence),
		storable(e.Source), storable(e.ID), storable(e.Type), text,
		attempts, reason, interval(pause), failed != nil && c.MaxAttempts == 1,
	}, nil)
	if err != nil {
		return fmt.Errorf("park event %d: %w", e.Sequence, err)
	}
	return nil
}

// dueSQL finds the first event of each aggregate, and those without an aggregate, whose time has come.
const dueSQL = `SELECT k.number FROM {parked} k
	WHERE k.consumer_name = $1::text AND k.dead_at IS NULL AND k.next_attempt_at <= pg_catalog.now()
		AND k.partition_hash % $2::bigint = $3::bigint
		AND NOT EXISTS (SELECT FROM {parked} e WHERE e.consumer_name = $1::text AND e.dead_at IS NULL
			AND pg_catalog.sha256(e.aggregate) = pg_catalog.sha256(k.aggregate)
			AND e.aggregate = k.aggregate AND e.number < k.number)
	ORDER BY k.number LIMIT 100`

const waitingSQL = `SELECT DISTINCT k.aggregate FROM {parked} k
	WHERE k.consumer_name = $1::text AND k.dead_at IS NULL AND k.aggregate IS NOT NULL
		AND k.partition_hash % $2::bigint = $3::bigint`

// mostRetries bounds how many parked events of an aggregate are handled before others have their turn.
const mostRetries = 100

// retryDue tries the parked events whose time has come, and then those that waited behind them.
func (p *partition) retryDue(ctx context.Context) error {
	due, err := p.due(ctx)
	if err != nil {
		return err
	}
	for _, number := range due {
		for n := 0; number != 0 && n < mostRetries; n++ {
			if number, err = p.retry(ctx, number); err != nil {
				return err
			}
		}
	}
	if len(due) == 0 {
		p.looked = time.Now()
	}
	return nil
}

// due also reads which aggregates wait: an operator may have changed that.
func (p *partition) due(ctx context.Context) (due []int64, err error) {
	waiting := map[string]bool{}
	err = p.look(ctx, func(ctx context.Context, t txn) error {
		args := []any{p.Name, p.Partitions, p.key}
		err := t.query(ctx, p.sql(dueSQL), args, func(scan func(...any) error) error {
			var number int64
			err := scan(&number)
			due = append(due, number)
			return err
		})
		if err != nil || p.SkipPoison {
			return err
		}
		return t.query(ctx, p.sql(waitingSQL), args, func(scan func(...any) error) error {
			var name []byte
			err := scan(&name)
			waiting[string(name)] = true
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("look for parked events: %w", err)
	}
	p.waiting = waiting
	return due, nil
}

const (
	parkedSQL = `SELECT k.event, k.attempts FROM {parked} k
		WHERE k.number = $1::bigint AND k.dead_at IS NULL FOR UPDATE OF k`

	// unparkSQL also finds the next event of the aggregate.
	unparkSQL = `WITH gone AS (DELETE FROM {parked} k WHERE k.number = $1::bigint AND k.dead_at IS NULL)
		SELECT coalesce((SELECT k.number FROM {parked} k
			WHERE k.consumer_name = $2::text AND k.dead_at IS NULL
				AND pg_catalog.sha256(k.aggregate) = pg_catalog.sha256($3::bytea)
				AND k.aggregate = $3::bytea AND k.number > $1::bigint
			ORDER BY k.number LIMIT 1), 0)`

	failedSQL = `UPDATE {parked} k SET attempts = $2::integer, last_error = $3::text,
			next_attempt_at = pg_catalog.now() + $4::text::interval,
			dead_at = CASE WHEN $5::boolean THEN pg_catalog.now() END
		WHERE k.number = $1::bigint AND k.dead_at IS NULL`
)

// retry hands one parked event to the handler, and deletes it in the same transaction. It returns the next
// one of its aggregate, 0 where there is none or the handler failed.
func (p *partition) retry(ctx context.Context, number int64) (next int64, err error) {
	c, err := p.begin(ctx, nil)
	if err != nil {
		return 0, err
	}
	defer func() { c.end() }()
	var text []byte
	var attempts int
	var e Event
	err = one(ctx, c.txn, p.sql(parkedSQL), []any{number}, &text, &attempts)
	if errors.Is(err, errNoRow) {
		return 0, nil // an operator was first
	}
	if err == nil {
		err = json.Unmarshal(text, &e)
	}
	if err != nil {
		return 0, fmt.Errorf("read parked event %d: %w", number, err)
	}
	e.Attempt = attempts + 1
	if c, err = p.call(ctx, c, []Event{e}); err == nil {
		next, err = c.unpark(ctx, number, &e)
		err = p.judge(ctx, c, err)
	}
	var failed failure
	switch {
	case errors.As(err, &failed):
		c.end()
		return 0, p.failedAgain(ctx, number, e, failed)
	case err != nil:
		return 0, err
	}
	p.metrics.processed(e.Type)
	return next, nil
}

func (c *claim) unpark(ctx context.Context, number int64, e *Event) (next int64, err error) {
	if err := c.usable(); err != nil {
		return 0, err
	}
	args := []any{number, c.Name, []byte(e.aggregate())}
	if err := one(ctx, c.txn, c.sql(unparkSQL), args, &next); err != nil {
		return 0, err
	}
	return next, c.finish(ctx, step{offset: c.offset})
}

// failedAgain counts the attempt. After the last one the event is a dead letter.
func (p *partition) failedAgain(ctx context.Context, number int64, e Event, failed error) error {
	c, err := p.begin(ctx, nil)
	if err != nil {
		return err
	}
	defer c.end()
	dead := e.Attempt >= p.MaxAttempts
	err = c.query(ctx, p.sql(failedSQL), []any{
		number, e.Attempt, errorText(failed), interval(p.backoff(e.Attempt)), dead,
	}, nil)
	if err == nil {
		err = c.finish(ctx, step{offset: p.offset})
	}
	if err == nil {
		p.reportFailure(ctx, e, failed, dead)
	}
	return err
}

func (p *partition) reportFailure(ctx context.Context, e Event, failed error, dead bool) {
	p.metrics.failed(e.Type)
	args := []any{
		"consumer", p.Name, "partition", p.key, "sequence", e.Sequence,
		"event_type", e.Type, "event_id", e.ID, "attempt", e.Attempt, "error", failed,
	}
	if dead {
		p.Logger.ErrorContext(ctx, "event is a dead letter: the handler failed too often",
			append(args, "hint", "mend the handler, then: walpost consumers dlq retry --consumer "+p.Name)...)
		return
	}
	p.Logger.WarnContext(ctx, "handler failed: the event is parked and tried again",
		append(args, "pause", p.backoff(e.Attempt))...)
}

// backoff is the pause after so many failures.
func (c *consumer) backoff(attempts int) time.Duration {
	pause := c.Backoff
	for range attempts - 1 {
		if pause *= 2; pause >= maxBackoff {
			return maxBackoff
		}
	}
	return pause
}

func interval(d time.Duration) string { return fmt.Sprintf("%d microseconds", d.Microseconds()) }

// maxError bounds the text of an error in the table, in bytes.
const maxError = 8192

func errorText(err error) string {
	text := err.Error()
	return storable(text[:min(len(text), maxError)])
}

// storable is a text that PostgreSQL takes.
func storable(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}
