package relay

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// errInsertsRead ends a session that has read the WAL for inserts only: the next one gets it again.
var errInsertsRead = fmt.Errorf(
	"%w: the WAL was read for rows that were inserted as processed", errModeChanged)

// isNoted reports whether a row that was inserted as processed could be taken for one that the stream has
// lost, and can say that it is none.
func isNoted(ev *outbox.Event) bool {
	return ev.Values[outbox.ProcessedAt] != nil && table.CanSkip(ev.Table)
}

// insertedRow is what NoteInserted is given.
func insertedRow(ev *outbox.Event) table.Row {
	row := table.RowOf(ev)
	row.Failure = string(ev.Values[outbox.ProcessedAt])
	return row
}

// noteInserted has it noted in a row that was inserted as processed, before the WAL up to it is
// confirmed: no later start can tell.
func (h *walHandler) noteInserted(ctx context.Context, ev *outbox.Event, txn *stream.Txn) error {
	h.reporter.sayInserted(ev.Table, zap.Stringer("row", ev.Ref()))
	if !isNoted(ev) {
		return nil
	}
	txn.Add()
	return h.marker.add(ctx, &markTask{row: insertedRow(ev), kind: toNote, by: txn})
}

// inserts reads, at a start, the WAL that no session has confirmed, for the rows that were inserted as
// processed.
type inserts struct {
	wal  *stream.Session
	stop func()
	ctx  context.Context // done when the reading ends

	pinned bool // the reader's own: nothing is confirmed

	mu   sync.Mutex // guards what follows
	rows map[outbox.Ref]table.Row
	full bool // there are more than mostCompared
}

func readInserts(ctx context.Context, wal *stream.Session) *inserts {
	n := &inserts{wal: wal, rows: map[outbox.Ref]table.Row{}}
	ctx, end := context.WithCancelCause(ctx)
	n.ctx = ctx
	var reading sync.WaitGroup
	reading.Go(func() { end(wal.Run(ctx, n, bufferBytes)) })
	n.stop = func() { end(errInsertsRead); reading.Wait() }
	return n
}

// of returns those of some marked rows that were inserted with the marks that they carry. The WAL has
// been read up to end, and they were marked before.
func (n *inserts) of(
	marked []table.MarkedRow, end outbox.LSN,
) (rows []table.Row, full bool, err error) {
	if err := n.wal.AwaitReceived(n.ctx, end); err != nil {
		return nil, false, err
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, m := range marked {
		row, ok := n.rows[m.Ref]
		if !ok { // too long for its content to be known
			row, ok = n.rows[outbox.Ref{Table: m.Table, ID: m.ID, Hash: outbox.UnknownHash}]
		}
		if !ok {
			continue
		}
		if at, err := outbox.ParseTimestamp([]byte(row.Failure)); err == nil && at.Equal(m.Marked) {
			rows = append(rows, row)
		}
	}
	return rows, n.full, nil
}

// Row implements stream.Handler.
func (n *inserts) Row(_ context.Context, ev *outbox.Event, txn *stream.Txn) error {
	if !n.pinned {
		n.pinned = true
		txn.Add()
	}
	if !table.IsMarked(ev) || !isNoted(ev) || ev.Table.Partitioned {
		return nil
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.full = n.full || len(n.rows) >= mostCompared; !n.full {
		row := insertedRow(ev)
		n.rows[row.Ref] = row
	}
	return nil
}

// Described implements stream.Handler.
func (n *inserts) Described(context.Context, bool) error { return nil }

// Commit implements stream.Handler.
func (n *inserts) Commit() {}

// Idle implements stream.Handler.
func (n *inserts) Idle(context.Context) error { return nil }

// Dry implements stream.Handler.
func (n *inserts) Dry() {}

// leaveInserted leaves out of marked rows that the stream does not hold those that were inserted so. Rows
// of the WAL that is confirmed say so themselves. full: which they are is not known.
func (c *comparison) leaveInserted(
	ctx context.Context, t *outbox.Table, gone []table.MarkedRow,
) (lost []table.MarkedRow, full bool, err error) {
	if len(gone) == 0 || c.wal == nil || t.Partitioned || !table.CanSkip(t) {
		return gone, false, nil
	}
	end, err := c.db.InsertLSN(ctx)
	if err == nil {
		err = c.db.Flush(ctx)
	}
	if err != nil {
		return nil, false, err
	}
	if c.inserts == nil {
		c.reporter.status.do("read the WAL for rows that were inserted as processed")
		c.inserts = readInserts(ctx, c.wal)
	}
	inserted, full, err := c.inserts.of(gone, end)
	if err != nil || full || len(inserted) == 0 {
		return gone, full, err
	}
	c.reporter.sayInserted(t, zap.Int("rows", len(inserted)), zap.String("first_id", inserted[0].Ref.ID))
	// What is locked is noted when the WAL is read again.
	_, err = c.db.NoteInserted(ctx, t, inserted)
	if err != nil && (!waitsOut(err) || !c.db.Alive()) {
		return nil, false, err
	}
	ids := map[string]struct{}{}
	for _, row := range inserted {
		ids[row.Ref.ID] = struct{}{}
	}
	return slices.DeleteFunc(gone, func(row table.MarkedRow) bool {
		_, ok := ids[row.ID]
		return ok
	}), false, nil
}
