package main

import (
	"context"
	"fmt"
	"time"

	"github.com/walpost/walpost/internal/sleep"
)

// verdict compares what was ordered with what took effect.
type verdict struct {
	orders, placed, effects, lost, duplicated, reordered, faults int
	others                                                       []string // what else is wrong
}

func (v verdict) ok() bool {
	return v.placed == v.orders && v.lost+v.duplicated+v.reordered == 0 && len(v.others) == 0
}

// String is the line for machines.
func (v verdict) String() string {
	const line = "walpost-shop: orders=%d placed=%d effects=%d lost=%d duplicated=%d reordered=%d faults=%d"
	return fmt.Sprintf(line, v.orders, v.placed, v.effects, v.lost, v.duplicated, v.reordered, v.faults)
}

const (
	// expectedSQL is how many events the orders have had: one for each version.
	expectedSQL = `SELECT coalesce(sum(version), 0) FROM orders`
	// settledSQL is what is not settled yet.
	settledSQL = `SELECT (SELECT count(*) FROM orders WHERE state <> 'paid')
		+ (` + expectedSQL + `) - (SELECT count(DISTINCT (public_id, version)) FROM order_view_log)
		+ (` + expectedSQL + `) - (SELECT count(DISTINCT event_id) FROM audit_log)
		+ (SELECT count(*) FROM consumer_parked)`
	lostSQL = `SELECT (` + expectedSQL + `) - count(DISTINCT (public_id, version)) FROM order_view_log`
	// duplicatedSQL also counts orders that one request placed twice.
	duplicatedSQL = `SELECT (SELECT count(*) - count(DISTINCT (public_id, version)) FROM order_view_log)
		+ (SELECT count(*) - count(DISTINCT client_ref) FROM orders)
		+ (SELECT count(*) - count(DISTINCT event_id) FROM audit_log)`
	reorderedSQL = `SELECT count(*) FROM (
		SELECT version, row_number() OVER (PARTITION BY public_id ORDER BY number) AS n FROM order_view_log) x
		 WHERE version <> n`
	differentSQL = `SELECT count(*) FROM orders o LEFT JOIN order_view v USING (tenant_id, public_id)
		WHERE (o.total, o.state, o.version) IS DISTINCT FROM (v.total, v.state, v.version)`
)

// judge waits until everything is settled, or nothing moves any more.
func (c *conductor) judge(ctx context.Context, l *load) (v verdict, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	least, since := -1, time.Now()
	for {
		left, err := c.count(ctx, settledSQL)
		if err == nil && (left == 0 || left == least && time.Since(since) > time.Minute) {
			break
		}
		if err == nil && (left < least || least < 0) {
			least, since = left, time.Now()
		}
		if time.Since(since) > 2*time.Minute || !sleep.For(ctx, 100*time.Millisecond) {
			break
		}
		if err := c.revive(); err != nil {
			return v, err
		}
	}
	v = verdict{orders: c.orders, faults: c.total()}
	for _, q := range []struct {
		into *int
		sql  string
	}{
		{&v.placed, `SELECT count(*) FROM orders`},
		{&v.effects, `SELECT count(*) FROM order_view_log`},
		{&v.lost, lostSQL},
		{&v.duplicated, duplicatedSQL},
		{&v.reordered, reorderedSQL},
	} {
		if *q.into, err = c.count(ctx, q.sql); err != nil {
			return v, err
		}
	}
	return v, c.judgeOthers(ctx, l, &v)
}

// judgeOthers looks at what the line has no word for.
func (c *conductor) judgeOthers(ctx context.Context, l *load, v *verdict) error {
	wrong := func(n int, format string, args ...any) {
		if n != 0 {
			v.others = append(v.others, fmt.Sprintf(format, args...))
		}
	}
	different, err := c.count(ctx, differentSQL)
	if err != nil {
		return err
	}
	wrong(different, "%d orders differ from the read model", different)
	unpaid, err := c.count(ctx, `SELECT count(*) FROM orders WHERE state <> 'paid'`)
	if err != nil {
		return err
	}
	wrong(unpaid, "%d orders are not paid", unpaid)
	audited, err := c.count(ctx, `SELECT (`+expectedSQL+`) - count(*) FROM audit_log`)
	if err != nil {
		return err
	}
	wrong(audited, "the audit log lacks %d events", audited)
	keys, calls := c.provider.charged()
	wrong(keys-c.orders, "%d charges for %d orders", keys, c.orders)
	c.say("%d requests were repeated, %d orders changed, %d charges took %d calls, audit log complete: %t",
		l.retries.Load(), l.changed.Load(), keys, calls, audited == 0)
	for _, text := range v.others {
		c.say("wrong: %s", text)
	}
	return nil
}

func (c *conductor) count(ctx context.Context, sql string) (n int, err error) {
	if err = c.pool.QueryRow(ctx, sql).Scan(&n); err != nil {
		err = fmt.Errorf("count: %w", err)
	}
	return n, err
}
