package relay

import (
	"context"
	"errors"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// endHolds ends the holds of aggregates that have no record left, and lets those
// that keep one record their queues.
func (l *loop) endHolds(ctx context.Context, t *outbox.Table, p *pass) error {
	quiet, when := l.holds.quiet(t), l.holds.now()
	if len(quiet) == 0 && !l.holds.forgets(t) {
		return nil
	}
	var stuck, all []aggregate
	n := 0
	err := l.db.Aggregates(ctx, t, func(key outbox.AggregateKey) {
		of := aggregate{t, key}
		delete(quiet, of)
		if !p.recorded[of] && l.holds.isClosing(of) {
			stuck = append(stuck, of) // nothing of it can be sent for now
		}
		if n++; n <= mostHeld/2 {
			all = append(all, of)
		}
	})
	if err != nil {
		return err
	}
	for _, of := range stuck {
		if err := l.recordQueue(ctx, of); err != nil {
			return err
		}
	}
	for of, joined := range quiet {
		if err := l.holds.end(of, joined, func(q pendingRow) error { return l.sendQueued(ctx, q) }); err != nil {
			var failure *publish.RowError
			if !errors.As(err, &failure) {
				return err
			}
			if err := l.recordQueue(ctx, of); err != nil {
				return err
			}
		}
	}
	l.holds.counted(t, n, all, when)
	return l.lane.Flush()
}

// sendQueued sends a row that queued up behind a hold that has ended. The WAL has
// brought it, and the lane's position is past it.
func (l *loop) sendQueued(ctx context.Context, q pendingRow) error {
	l.lane.Pass(q.ev.Commit)
	err := l.lane.SendPolled(ctx, q.ev, q.txn)
	var failure *publish.RowError
	if errors.As(err, &failure) {
		l.r.refused(q.ev.Ref(), string(q.ev.Values[outbox.EventType]), failure)
		row := fallback.RowOf(q.ev)
		row.Failure = failure.Error()
		return errors.Join(err, l.settler.park(ctx, row, aggregateOf(q.ev), q.txn))
	}
	return err
}

func (l *loop) recordQueue(ctx context.Context, of aggregate) error {
	return l.holds.reopen(of, func(q pendingRow) error {
		return l.settler.hold(ctx, fallback.RowOf(q.ev), of, q.txn)
	})
}
