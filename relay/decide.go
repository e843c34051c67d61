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
	// toSkip: it is stored, dead, in the relay's hands already, or left to the table until it is due.
	toSkip
	// toLeave: it was inserted as a held row. It is recorded, and the poller delivers it.
	toLeave
	// toNoteInserted: it was inserted as processed.
	toNoteInserted
)

// decide says what becomes of a row. The row's mark says who knows: the table or, without
// marks, the positions in the stream. A *outbox.RowError means that the row can never be sent.
func (h *walHandler) decide(ctx context.Context, ev *outbox.Event) (decision, error) {
	if !table.MarkOf(ev.Table).InTable() {
		return h.decideByPosition(ctx, ev)
	}
	return h.decideByTable(ctx, ev)
}

// decideByTable: a marked row is noted, a delayed one left to the table, a recorded one to the poller. The
// table is asked about a row that an earlier session may have sent, that was taken from the WAL or the table
// before, or that may be recorded. Every other row is new.
func (h *walHandler) decideByTable(ctx context.Context, ev *outbox.Event) (decision, error) {
	if table.IsMarked(ev) {
		if ev.Table.Partitioned {
			return toSkip, nil // it was inserted so, or marked and moved from another partition
		}
		return toNoteInserted, nil
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
	ask := false
	if ev.Table.Partitioned {
		inHand := false
		if inHand, ask, err = h.takeMoved(ctx, ev); err != nil || inHand {
			return toSkip, err
		}
	}
	if h.recovered.mayHaveBeenSent(ev) || h.mayBeRecorded(ev) || ask {
		return toAsk, nil
	}
	return toSend, nil
}

// decideByPosition skips a row that was sent, or that has become a dead letter.
func (h *walHandler) decideByPosition(ctx context.Context, ev *outbox.Event) (decision, error) {
	if table.IsMarked(ev) {
		return toSkip, nil // it was inserted as delivered or dead
	}
	s := h.recovered
	if !s.tail.Covers(ev.Commit, ev.N) {
		if s.mayHaveBeenSent(ev) && s.sent.has(ev) {
			return toSkip, nil
		}
		return toSend, nil
	}
	if !s.sent.mayBeMissing(ev) || s.sent.has(ev) {
		return toSkip, nil
	}
	dead, err := h.db.IsDead(ctx, ev)
	if dead || err != nil {
		return toSkip, err
	}
	return toSend, nil
}
