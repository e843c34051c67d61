package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// feed takes what the WAL brings to the lane. It runs on the reader's goroutine.
type feed struct {
	reporter  *reporter
	cfg       *Config
	db        *table.DB
	lane      *publish.Publisher
	settler   *settler
	holds     *holds
	loop      *loop
	recovered *recoveryState
	moved     *moved
	altered   chan<- struct{}
	poison    map[outbox.Ref]*publish.RowError // see history

	// gate holds rows that the table decides about: those under E, the greatest
	// LSN under which anything can have been sent before. A row leaves it when its
	// next place has it. mu guards it; only the reader changes it.
	mu   sync.Mutex
	gate []pendingRow
	size int

	// The rows of a transaction mostly fall due at one time: the last one, as the row
	// has it, and read.
	available []byte
	due       time.Time
}

// pendingRow is a row that the WAL has brought and that is not in the lane yet.
type pendingRow struct {
	ev  *outbox.Event
	txn *stream.Txn
}

// The gate looks up so many rows at once.
const (
	gateRows  = 512
	gateBytes = 1 << 20
)

// gated calls each with every row in the gate.
func (f *feed) gated(each func(outbox.Ref)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, h := range f.gate {
		each(h.ev.Ref())
	}
}

// Row implements stream.Handler.
func (f *feed) Row(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	what, err := f.decide(ctx, ev)
	if err != nil {
		var failure *publish.RowError
		if !errors.As(err, &failure) {
			return err
		}
		txn.Add()
		return f.refuse(ctx, ev, txn, failure)
	}
	switch what {
	case toSkip:
		return nil
	case toAsk:
		return f.hold(ctx, ev, txn)
	case toLeave:
		return f.leave(ctx, ev, txn)
	case toNoteInserted:
		return f.noteInserted(ctx, ev, txn)
	}
	// Nothing overtakes the gate: the positions in the stream never go back.
	if err := f.flush(ctx); err != nil {
		return err
	}
	if ev.Commit > f.recovered.recoveryLSN {
		f.recovered.forget()
	}
	return f.send(ctx, ev, txn)
}

// isRecorded reports whether the row was inserted with a record: a dead letter that is tried
// again, or a recorded row that has moved into another partition.
func (f *feed) isRecorded(ev *outbox.Event) bool {
	record := ev.Values[outbox.LastError]
	if record == nil || !ev.Table.Layout.Records() {
		return false
	}
	return table.IsHeld(record) || ev.Table.Partitioned
}

// Altered implements stream.Handler.
func (f *feed) Altered() {
	select {
	case f.altered <- struct{}{}:
	default:
	}
}

// leave leaves to the loop what was inserted as a held row: a dead letter that is
// tried again. The WAL may have its first insert, too, so only the table's word
// counts. Later rows of its aggregate wait for it.
func (f *feed) leave(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	of := aggregateOf(ev)
	txn.Add()
	f.holds.beginRecord(of)
	return f.settler.hold(ctx, table.RowOf(ev), of, left{txn, f.loop})
}

// left wakes the loop when the row is visible.
type left struct {
	*stream.Txn
	loop *loop
}

func (l left) Settled() {
	l.Txn.Settled()
	l.loop.nudge()
}

// mayBeRecorded: where rows pass a failed one, that one itself may come again. Elsewhere the
// table is asked where only it can tell whether a row is held, about many rows at once.
func (f *feed) mayBeRecorded(ev *outbox.Event) bool {
	if !f.holds.any() {
		return false
	}
	of := aggregateOf(ev)
	if f.cfg.OnPoison == Skip || !of.ordered() {
		return f.holds.mayHave(of)
	}
	return f.holds.unsure(of)
}

// Idle implements stream.Handler: the server has sent all it has, so what the
// gate holds need not wait for company.
func (f *feed) Idle(ctx context.Context) error {
	err := f.flush(ctx)
	f.lane.EndTransaction()
	return err
}

// Commit implements stream.Handler.
func (f *feed) Commit() { f.lane.EndTransaction() }

// Dry implements stream.Handler. A lane that cannot write says so at the next row.
func (f *feed) Dry() { _ = f.lane.Flush() }

// delayed is how long after its commit the row falls due, where that is later
// than the threshold.
func (f *feed) delayed(ev *outbox.Event) (time.Duration, error) {
	v := ev.Values[outbox.AvailableAt]
	if v == nil {
		return 0, nil
	}
	if !bytes.Equal(v, f.available) {
		due, err := outbox.ParseTimestamp(v)
		if err != nil {
			return 0, fmt.Errorf("available_at: %w", err)
		}
		f.available, f.due = append(f.available[:0], v...), due
	}
	if wait := f.due.Sub(ev.CommitTime); wait > f.cfg.DelayThreshold {
		return wait, nil
	}
	return 0, nil
}

func (f *feed) hold(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	txn.Add()
	f.mu.Lock()
	f.gate = append(f.gate, pendingRow{ev.Clone(), txn})
	f.mu.Unlock()
	f.size += ev.Size()
	if len(f.gate) < gateRows && f.size < gateBytes {
		return nil
	}
	return f.flush(ctx)
}

// flush asks the table about the rows in the gate and sends those that it wants
// sent, in their order.
func (f *feed) flush(ctx context.Context) error {
	if len(f.gate) == 0 {
		return nil
	}
	for batch := f.gate; len(batch) > 0; {
		n := sameTable(batch)
		if err := f.askTable(ctx, batch[:n]); err != nil {
			return err
		}
		batch = batch[n:]
	}
	f.mu.Lock()
	f.gate, f.size = f.gate[:0], 0
	f.mu.Unlock()
	return nil
}

// sameTable is the length of the run of rows of the first one's table.
func sameTable(batch []pendingRow) int {
	n := 1
	for n < len(batch) && batch[n].ev.Table == batch[0].ev.Table {
		n++
	}
	return n
}

// askTable sends the rows that the table holds pending and unrecorded, or does not show yet (law 3). Rows that
// were read in the stream are not asked about: they wait for their marks.
func (f *feed) askTable(ctx context.Context, batch []pendingRow) error {
	var ask []pendingRow
	var rows []table.Row
	for _, h := range batch {
		row := table.RowOf(h.ev)
		if behind, ok := f.recovered.messagesBehind(row.Ref, false); ok {
			// It was read in the stream. Whatever the table shows, it is not sent.
			if err := f.settler.stored(ctx, row, behind, h.txn); err != nil {
				return err
			}
			continue
		}
		ask, rows = append(ask, h), append(rows, row)
	}
	if len(ask) == 0 {
		return nil
	}
	states, err := f.lookUp(ctx, ask[0].ev.Table, rows)
	if err != nil {
		return err
	}
	evs := make([]*outbox.Event, len(ask))
	for i, h := range ask {
		evs[i] = h.ev
	}
	asked, err := f.askRecords(ctx, evs...)
	if err != nil {
		return err
	}
	for i, h := range ask {
		if !states[i].Publish() {
			h.txn.Settled()
			continue
		}
		if err := f.sendAdded(ctx, h.ev, h.txn, asked); err != nil {
			return err
		}
	}
	return nil
}

// askRecords asks the table which rows' aggregates have records, where only it can tell. The
// rows are of one table.
func (f *feed) askRecords(ctx context.Context, evs ...*outbox.Event) (asOf, error) {
	if f.cfg.OnPoison == Skip || !f.holds.any() {
		return 0, nil
	}
	return f.holds.ask(evs, func(evs []*outbox.Event) (have []bool, err error) {
		err = f.patiently(ctx, evs[0].Table, func() error {
			have, err = f.db.HaveRecords(ctx, evs[0].Table, evs)
			return err
		})
		return have, err
	})
}

func (f *feed) lookUp(ctx context.Context, t *outbox.Table, rows []table.Row) (states []table.State, err error) {
	err = f.patiently(ctx, t, func() error {
		states, err = f.db.LookUp(ctx, t, rows)
		return err
	})
	return states, err
}

// patiently waits out a table that somebody has locked.
func (f *feed) patiently(ctx context.Context, t *outbox.Table, ask func() error) error {
	for {
		err := ask()
		if err == nil || !table.Passing(err) {
			return err
		}
		f.reporter.trouble("the table is locked: waiting", err, zapTable(t))
		if !sleep(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
	}
}

func (f *feed) send(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	txn.Add()
	return f.sendAdded(ctx, ev, txn, 0)
}

// sendAdded sends a row, unless it is held. asked is when the table was asked for records of
// its aggregate.
func (f *feed) sendAdded(ctx context.Context, ev *outbox.Event, txn *stream.Txn, asked asOf) error {
	if len(f.poison) > 0 && ev.Table.Mark == outbox.MarkNone {
		if failure := f.poison[ev.Ref()]; failure != nil {
			return f.refuse(ctx, ev, txn, failure)
		}
	}
	if f.cfg.OnPoison != Skip && f.holds.any() {
		if held, err := f.joinHold(ctx, pendingRow{ev, txn}, asked); held || err != nil {
			return err
		}
	}
	err := f.lane.Send(ctx, ev, txn)
	if err == nil {
		return nil
	}
	var row *publish.RowError
	if errors.As(err, &row) {
		return f.refuse(ctx, ev, txn, row)
	}
	return err
}

// joinHold reports whether a row waits behind a failed one: it is recorded, or queues up.
func (f *feed) joinHold(ctx context.Context, row pendingRow, asked asOf) (held bool, err error) {
	for err == nil {
		v, record := f.holds.join(row, asked)
		switch v {
		case isFree:
			return false, nil
		case isHeld:
			return true, f.record(ctx, record)
		case isUnknown:
			asked, err = f.askRecords(ctx, row.ev)
		case isDraining:
			err = f.holds.awaitDrain(ctx)
		}
	}
	return false, err
}

// record has rows recorded that wait behind a failed one.
func (f *feed) record(ctx context.Context, rows []pendingRow) error {
	for _, h := range rows {
		if err := f.settler.hold(ctx, table.RowOf(h.ev), aggregateOf(h.ev), h.txn); err != nil {
			return err
		}
	}
	return nil
}

// refuse records a row that cannot be sent. Nothing waits for it but its
// transaction, except where only the dead letters will ever know of it.
func (f *feed) refuse(ctx context.Context, ev *outbox.Event, txn *stream.Txn, failure *publish.RowError) error {
	if ev.Table.Mark == outbox.MarkNone {
		if err := f.db.Bury(ctx, ev, failure.Error()); err != nil {
			return err
		}
		f.reporter.buried(ev.Ref(), failure.Error())
		delete(f.poison, ev.Ref())
		txn.Settled()
	} else {
		row := table.RowOf(ev)
		row.Failure = failure.Error()
		if err := f.settler.park(ctx, row, aggregateOf(ev), txn); err != nil {
			return err
		}
	}
	// Only now: what was not recorded comes again.
	f.reporter.refused(ev.Ref(), string(ev.Values[outbox.EventType]), failure)
	return nil
}
