package fallback

import (
	"context"
	"errors"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// endHolds ends the holds of aggregates without a record, and has the queues of the others recorded.
func (l *Poller) endHolds(ctx context.Context, t *outbox.Table, p *pass) error {
	quiet, when := l.holds.quiet(t), l.holds.now()
	if len(quiet) == 0 && !l.holds.forgets(t) {
		return nil
	}
	records := func(each func(outbox.AggregateKey)) error { return l.db.Aggregates(ctx, t, each) }
	work := func(row PendingRow, send bool) error {
		if send {
			return l.sendQueued(ctx, row)
		}
		return l.marker.Hold(ctx, table.RowOf(row.Event), AggregateOf(row.Event), row.By)
	}
	if err := l.holds.endThose(t, quiet, when, p.recorded, records, work); err != nil {
		return err
	}
	return l.publisher.Flush()
}

// endThose ends the holds in quiet, except of aggregates that the table shows a record of. If a record
// stays and no row of its aggregate was sent, the queue is recorded: nothing can be sent for now.
// records asks the table for the aggregates with records; work sends or records a queued row.
func (h *Holds) endThose(
	t *outbox.Table, quiet map[Aggregate]struct{}, when AsOf, sent map[Aggregate]bool,
	records func(each func(outbox.AggregateKey)) error, work func(row PendingRow, send bool) error,
) error {
	var stuck, all []Aggregate
	n := 0
	err := records(func(key outbox.AggregateKey) {
		of := Aggregate{t, key}
		delete(quiet, of)
		if !sent[of] && h.queues(of) {
			stuck = append(stuck, of)
		}
		if n++; n <= h.most/2 {
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
func (l *Poller) sendQueued(ctx context.Context, row PendingRow) error {
	l.publisher.Pass(row.Event.Commit)
	err := l.publisher.SendPolled(ctx, row.Event, row.By)
	var failure *outbox.RowError
	if !errors.As(err, &failure) {
		return err
	}
	l.reporter.Refused(row.Event.Ref(), string(row.Event.Values[outbox.EventType]), failure)
	failed := table.RowOf(row.Event)
	failed.Failure = failure.Error()
	return l.marker.Park(ctx, failed, AggregateOf(row.Event), row.By)
}
