package relay

import (
	"context"
	"errors"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// endHolds ends the holds of aggregates without a record, and has the queues of the others recorded.
func (l *poller) endHolds(ctx context.Context, t *outbox.Table, p *pass) error {
	quiet, when := l.holds.quiet(t), l.holds.now()
	if len(quiet) == 0 && !l.holds.forgets(t) {
		return nil
	}
	records := func(each func(outbox.AggregateKey)) error { return l.db.Aggregates(ctx, t, each) }
	work := func(row pendingRow, send bool) error {
		if send {
			return l.sendQueued(ctx, row)
		}
		return l.marker.hold(ctx, table.RowOf(row.ev), aggregateOf(row.ev), row.txn)
	}
	if err := l.holds.endThose(t, quiet, when, p.recorded, records, work); err != nil {
		return err
	}
	return l.publisher.Flush()
}

// endThose ends the holds in quiet, except of aggregates that the table shows a record of. If a record
// stays and no row of its aggregate was sent, the queue is recorded: nothing can be sent for now.
// records asks the table for the aggregates with records; work sends or records a queued row.
func (h *holds) endThose(
	t *outbox.Table, quiet map[aggregate]struct{}, when asOf, sent map[aggregate]bool,
	records func(each func(outbox.AggregateKey)) error, work func(row pendingRow, send bool) error,
) error {
	var stuck, all []aggregate
	n := 0
	err := records(func(key outbox.AggregateKey) {
		of := aggregate{t, key}
		delete(quiet, of)
		if !sent[of] && h.queues(of) {
			stuck = append(stuck, of)
		}
		if n++; n <= mostHeld/2 {
			all = append(all, of)
		}
	})
	if err != nil {
		return err
	}
	for _, of := range stuck {
		if h.keep(of) {
			if err := h.empty(of, work); err != nil {
				return err
			}
		}
	}
	for of := range quiet {
		if h.end(of) {
			if err := h.empty(of, work); err != nil {
				return err
			}
		}
	}
	h.counted(t, n, all, when)
	return nil
}

// sendQueued sends a row, or parks it. The WAL has brought it, and the publisher's position is past it.
func (l *poller) sendQueued(ctx context.Context, row pendingRow) error {
	l.publisher.Pass(row.ev.Commit)
	err := l.publisher.SendPolled(ctx, row.ev, row.txn)
	var failure *outbox.RowError
	if !errors.As(err, &failure) {
		return err
	}
	l.reporter.refused(row.ev.Ref(), string(row.ev.Values[outbox.EventType]), failure)
	failed := table.RowOf(row.ev)
	failed.Failure = failure.Error()
	return l.marker.park(ctx, failed, aggregateOf(row.ev), row.txn)
}
