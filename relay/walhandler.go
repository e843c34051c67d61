package relay

import (
	"bytes"
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// walHandler takes what the WAL brings to the publisher. It runs on the reader's goroutine.
type walHandler struct {
	reporter  *reporter
	cfg       *Config
	db        *table.DB
	publisher *publish.Publisher
	marker    *marker
	holds     *fallback.Holds
	poller    *fallback.Poller
	recovered *recoveryState
	moved     *fallback.Moved
	takenTo   map[*outbox.Table]int64 // the ids of append-only tables that the journal knew
	altered   chan<- struct{}
	leaves    func(*outbox.Table) (as string, leaves bool)
	// checkPublished ends the session where the publication has an outbox in another way.
	checkPublished func(context.Context) error

	// recoveryBuffer has rows that the table decides about: those up to the recovery LSN,
	// mostly. A row leaves it when its next place has it. mu guards it; only the reader
	// changes it.
	mu             sync.Mutex
	recoveryBuffer []fallback.PendingRow
	size           int

	// The rows of a transaction mostly fall due at one time: the last one, as the row
	// has it, and read.
	available []byte
	due       time.Time
}

// The recovery buffer looks up so many rows at once.
const (
	bufferRows  = 512
	bufferBytes = 1 << 20
)

// eachBuffered calls each with every row in the recovery buffer.
func (h *walHandler) eachBuffered(each func(outbox.Ref)) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range h.recoveryBuffer {
		each(r.Event.Ref())
	}
}

// Row implements stream.Handler.
func (h *walHandler) Row(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	what, err := h.decide(ctx, ev)
	if err != nil {
		failure := rowFailure(err)
		if failure == nil {
			return err
		}
		txn.Add()
		return h.refuse(ctx, ev, txn, failure)
	}
	switch what {
	case toSkip:
		return nil
	case toAsk:
		return h.addToBuffer(ctx, ev, txn)
	case toLeave:
		return h.leave(ctx, ev, txn)
	case toNoteInserted:
		return h.noteInserted(ctx, ev, txn)
	}
	// Nothing overtakes the recovery buffer: the positions in the stream never go back.
	if err := h.flushBuffer(ctx); err != nil {
		return err
	}
	if ev.Commit > h.recovered.recoveryLSN {
		h.recovered.forget()
	}
	return h.send(ctx, ev, txn)
}

// isRecorded reports whether the row was inserted with a record: a dead letter that is tried
// again, or a recorded row that has moved into another partition.
func (h *walHandler) isRecorded(ev *outbox.Event) bool {
	if !ev.Table.Layout.Records() || !table.IsRecorded(ev) {
		return false
	}
	return table.IsHeld(ev) || ev.Table.Partitioned
}

// Described implements stream.Handler. An outbox that was taken out of the publication and is in it again has
// rows between, which come first.
func (h *walHandler) Described(ctx context.Context, altered bool) error {
	if altered {
		select {
		case h.altered <- struct{}{}:
		default:
		}
	}
	return h.checkPublished(ctx)
}

// leave leaves to the poller what was inserted as a held row: a dead letter that is
// tried again. The WAL may have its first insert, too, so only the table's word
// counts. Later rows of its aggregate wait for it.
func (h *walHandler) leave(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	of := fallback.AggregateOf(ev)
	txn.Add()
	h.holds.BeginRecord(of)
	return h.marker.Hold(ctx, table.RowOf(ev), of, left{txn, h.poller})
}

// left wakes the poller when the row is visible.
type left struct {
	*stream.Txn
	poller *fallback.Poller
}

func (l left) Settled() {
	l.Txn.Settled()
	l.poller.Nudge()
}

// mayBeRecorded: where rows pass a failed one, that one itself may come again. Elsewhere the
// table is asked where only it can tell whether a row is held, about many rows at once.
func (h *walHandler) mayBeRecorded(ev *outbox.Event) bool {
	if !h.holds.Any() {
		return false
	}
	of := fallback.AggregateOf(ev)
	if h.cfg.OnPoison == fallback.Skip || !of.Ordered() {
		return h.holds.MayHave(of)
	}
	return h.holds.Unsure(of)
}

// Idle implements stream.Handler: the server has sent all it has, so what the
// recovery buffer has need not wait for company.
func (h *walHandler) Idle(ctx context.Context) error {
	err := h.flushBuffer(ctx)
	h.publisher.EndTransaction()
	return err
}

// Commit implements stream.Handler.
func (h *walHandler) Commit() { h.publisher.EndTransaction() }

// Dry implements stream.Handler. A publisher that cannot write says so at the next row.
func (h *walHandler) Dry() { _ = h.publisher.Flush() }

// delayed is how long after its commit the row falls due, where that is later
// than the threshold.
func (h *walHandler) delayed(ev *outbox.Event) (time.Duration, error) {
	v := ev.Values[outbox.AvailableAt]
	if v == nil {
		return 0, nil
	}
	if !bytes.Equal(v, h.available) {
		due, err := outbox.ParseTimestamp(v)
		if err != nil {
			return 0, fmt.Errorf("available_at: %w", err)
		}
		h.available, h.due = append(h.available[:0], v...), due
	}
	if wait := h.due.Sub(ev.CommitTime); wait > h.cfg.DelayThreshold {
		return wait, nil
	}
	return 0, nil
}

func (h *walHandler) addToBuffer(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	txn.Add()
	h.mu.Lock()
	h.recoveryBuffer = append(h.recoveryBuffer, fallback.PendingRow{Event: ev.Clone(), By: txn})
	h.mu.Unlock()
	h.size += ev.Size()
	if len(h.recoveryBuffer) < bufferRows && h.size < bufferBytes {
		return nil
	}
	return h.flushBuffer(ctx)
}

// flushBuffer asks the table about the rows in the recovery buffer and sends those that it wants
// sent, in their order.
func (h *walHandler) flushBuffer(ctx context.Context) error {
	if len(h.recoveryBuffer) == 0 {
		return nil
	}
	for batch := h.recoveryBuffer; len(batch) > 0; {
		n := sameTable(batch)
		if err := h.askTable(ctx, batch[:n]); err != nil {
			return err
		}
		batch = batch[n:]
	}
	h.mu.Lock()
	h.recoveryBuffer, h.size = h.recoveryBuffer[:0], 0
	h.mu.Unlock()
	return nil
}

// sameTable is the length of the run of rows of the first one's table.
func sameTable(batch []fallback.PendingRow) int {
	n := 1
	for n < len(batch) && batch[n].Event.Table == batch[0].Event.Table {
		n++
	}
	return n
}

// askTable sends the rows that the table holds pending and unrecorded, or does not show yet. Those that were
// read in the stream wait for their marks.
func (h *walHandler) askTable(ctx context.Context, batch []fallback.PendingRow) error {
	rows := make([]table.Row, len(batch))
	evs := make([]*outbox.Event, len(batch))
	for i, r := range batch {
		rows[i], evs[i] = table.RowOf(r.Event), r.Event
	}
	states, err := h.lookUp(ctx, batch[0].Event.Table, rows)
	if err != nil {
		return err
	}
	asked, err := h.askRecords(ctx, evs...)
	if err != nil {
		return err
	}
	for i, r := range batch {
		if !states[i].Publish() {
			r.By.Settled()
			continue
		}
		behind, stored, err := h.recovered.StoredBefore(ctx, r.Event, false)
		if stored {
			err = h.marker.Stored(ctx, rows[i], behind, r.By)
		} else if err == nil {
			err = h.sendOrHold(ctx, r.Event, r.By, asked)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// askRecords asks the table which rows' aggregates have records, where only it can tell. The
// rows are of one table.
func (h *walHandler) askRecords(ctx context.Context, evs ...*outbox.Event) (fallback.AsOf, error) {
	if h.cfg.OnPoison == fallback.Skip || !h.holds.Any() {
		return 0, nil
	}
	return h.holds.Ask(evs, func(evs []*outbox.Event) (have []bool, err error) {
		err = h.patiently(ctx, evs[0].Table, func() error {
			have, err = h.db.HaveRecords(ctx, evs[0].Table, evs)
			return err
		})
		return have, err
	})
}

func (h *walHandler) lookUp(
	ctx context.Context, t *outbox.Table, rows []table.Row,
) (states []table.State, err error) {
	err = h.patiently(ctx, t, func() error {
		states, err = h.db.LookUpInserted(ctx, t, rows)
		return err
	})
	return states, err
}

// patiently waits out a table that somebody has locked.
func (h *walHandler) patiently(ctx context.Context, t *outbox.Table, ask func() error) error {
	for {
		err := ask()
		if err == nil || !waitsOut(err) {
			return err
		}
		h.reporter.trouble("the table is locked: waiting", err, zapTable(t))
		if !sleep.For(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
	}
}

func (h *walHandler) send(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	txn.Add()
	return h.sendOrHold(ctx, ev, txn, 0)
}

// sendOrHold sends a row, unless it is held. asked is when the table was asked for records of
// its aggregate.
func (h *walHandler) sendOrHold(
	ctx context.Context, ev *outbox.Event, txn fallback.Waiter, asked fallback.AsOf,
) error {
	if h.cfg.OnPoison != fallback.Skip && h.holds.Any() {
		if held, err := h.joinHold(ctx, fallback.PendingRow{Event: ev, By: txn}, asked); held || err != nil {
			return err
		}
	}
	err := h.publisher.Send(ctx, ev, txn)
	if err == nil {
		return nil
	}
	if failure := rowFailure(err); failure != nil {
		return h.refuse(ctx, ev, txn, failure)
	}
	return err
}

// joinHold reports whether a row waits behind a failed one: it is recorded, or queues up.
func (h *walHandler) joinHold(
	ctx context.Context, row fallback.PendingRow, asked fallback.AsOf,
) (held bool, err error) {
	for err == nil {
		v, record := h.holds.Join(row, asked)
		switch v {
		case fallback.IsFree:
			return false, nil
		case fallback.IsHeld:
			return true, h.record(ctx, record)
		case fallback.IsUnknown:
			asked, err = h.askRecords(ctx, row.Event)
		case fallback.IsEmptying:
			err = h.holds.AwaitEmptied(ctx)
		}
	}
	return false, err
}

// record has rows recorded that wait behind a failed one.
func (h *walHandler) record(ctx context.Context, rows []fallback.PendingRow) error {
	for _, r := range rows {
		if err := h.marker.Hold(ctx, table.RowOf(r.Event), fallback.AggregateOf(r.Event), r.By); err != nil {
			return err
		}
	}
	return nil
}

// refuse records a row that cannot be sent. Nothing waits for it but its transaction.
func (h *walHandler) refuse(
	ctx context.Context, ev *outbox.Event, txn fallback.Waiter, failure *outbox.RowError,
) error {
	row := table.RowOf(ev)
	row.Failure = failure.Error()
	if err := h.marker.Park(ctx, row, fallback.AggregateOf(ev), txn); err != nil {
		return err
	}
	// Only now: what was not recorded comes again.
	h.reporter.refused(ev.Ref(), string(ev.Values[outbox.EventType]), failure)
	return nil
}
