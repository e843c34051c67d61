package relay

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// Misfit implements stream.Handler. Where only the WAL has the row, it becomes a dead letter, with
// all its columns, before anything behind it is sent.
func (h *walHandler) Misfit(
	ctx context.Context, ev *outbox.Event, columns map[string]*string, omitted []string, reason error,
) error {
	if table.MarkOf(ev.Table).InTable() {
		return fmt.Errorf("%w: %w", stream.ErrUndecodable, reason)
	}
	if h.recovered.tail.Covers(ev.Commit, ev.N) && !h.recovered.sent.mayBeMissing(ev) {
		return nil // it is a dead letter already, or was sent under another layout
	}
	failure := &outbox.RowError{Class: outbox.RowHeaders, Reason: reason.Error()}
	if err := h.db.AddDeadLetterOfColumns(ctx, ev, columns, omitted, failure.Error()); err != nil {
		return err
	}
	if !h.reporter.limited("undecodable", factsAgain) {
		h.reporter.alarm(alarm.Undecodable,
			zap.Stringer("row", ev.Ref()), zap.Error(reason))
	}
	h.reporter.deadLetter(ev.Ref(), failure.Error())
	h.reporter.refused(ev.Ref(), string(ev.Values[outbox.EventType]), failure)
	return nil
}
