package relay

import (
	"context"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// decision is what becomes of a row that the WAL brings.
type decision uint8

const (
	// toSend: into the publisher. Where its aggregate is held, walHandler.sendOrHold has it recorded or
	// queued.
	toSend decision = iota
	// toAsk: the table decides, in batches (walHandler.askTable).
	toAsk
	// toSkip: it is stored, dead, in the relay's hands already, or left to the table: until it is due, or
	// because its outbox joins.
	toSkip
	// toLeave: it was inserted as a held row. It is recorded, and the poller delivers it.
	toLeave
	// toNoteInserted: it was inserted as processed.
	toNoteInserted
)

// decide says what becomes of a row: a marked one is noted, a delayed one, or one of an outbox that joins,
// left to the table, a recorded one to the poller. The table is asked about a row that an earlier session may
// have sent, that was taken from the WAL or the table before, or that may be recorded: somebody may have
// moved a delivered row, or put it back. Every other row is new. A *outbox.RowError means that the row can
// never be sent.
func (h *walHandler) decide(ctx context.Context, ev *outbox.Event) (d decision, err error) {
	if table.IsMarked(ev) {
		if ev.Table.Partitioned {
			return toSkip, nil // it was inserted so, or marked and moved from another partition
		}
		return toNoteInserted, nil
	}
	inHand, ask := false, false
	if table.Journals(ev.Table) { // also of a row that is left to the table
		if inHand, ask, err = h.takeID(ctx, ev); err != nil || inHand {
			return toSkip, err
		}
	}
	if _, left := h.leaves(ev.Table); left {
		return toSkip, nil
	}
	wait, err := h.delayed(ev)
	if err != nil {
		return toSkip, &outbox.RowError{Class: outbox.RowHeaders, Reason: err.Error()}
	}
	if wait > 0 {
		h.poller.DueIn(wait)
		return toSkip, nil // left to the table
	}
	if h.isRecorded(ev) {
		return toLeave, nil
	}
	if ev.Table.Partitioned {
		if inHand, ask, err = h.takeMoved(ctx, ev); err != nil || inHand {
			return toSkip, err
		}
	}
	if ask || h.recovered.mayHaveBeenSent(ev) || h.mayBeRecorded(ev) {
		return toAsk, nil
	}
	return toSend, nil
}
