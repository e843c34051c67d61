package relay

import (
	"context"
	"slices"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// backwardScan is the first pass of a recovery. It reads the relay's own messages from the tail, in steps of
// U, until a whole step shows no pending row and no row that was marked at or after T, and begins no later
// than the last sequence that was noted of each outbox. It changes nothing.
type backwardScan struct {
	rows  *messageRows
	notes *notes
	found jetstream.Found
	steps int  // with a row of the relay's outboxes among their messages
	more  bool // the last step asked for another one
	// oldest is the oldest message whose row is pending; Seq is 0 without one.
	oldest   jetstream.Message
	marks    *marksRead
	notShown map[outbox.Ref]readBack // see recoveryState
}

func scanBackward(
	ctx context.Context, from *jetstream.Stream, rows *messageRows, n *notes,
	info *jetstream.StreamInfo, o jetstream.ScanOptions,
) (*backwardScan, error) {
	b := &backwardScan{rows: rows, notes: n, marks: newMarksRead(), notShown: map[outbox.Ref]readBack{}}
	o.Step = func(messages []jetstream.Message) (bool, error) { return b.step(ctx, messages) }
	var err error
	b.found, err = from.ScanBackward(ctx, info.FirstSeq, info.LastSeq, o)
	return b, err
}

// step looks at up to U messages, the newest first, and reports whether the pass has to go on.
func (b *backwardScan) step(ctx context.Context, messages []jetstream.Message) (more bool, err error) {
	if !slices.ContainsFunc(messages, b.rows.has) {
		b.more = !b.notes.enough(messages[0].Seq)
		return b.more, nil
	}
	b.steps++
	more = b.notes.wants(messages[0].Seq)
	err = b.rows.each(ctx, messages, func(batch rowBatch) error {
		for i, s := range batch.states {
			more = b.look(batch.table, batch.messages[i], batch.rows[i].Ref, s) || more
		}
		return nil
	})
	b.more = more
	return more, err
}

// look reports whether a row asks for another step: it is pending, or marked at or after T.
func (b *backwardScan) look(t *outbox.Table, m jetstream.Message, ref outbox.Ref, s table.State) bool {
	b.marks.known = b.marks.known || s.Exists
	switch {
	case !s.Exists || !s.Same:
		if s.Exists {
			b.marks.addChanged(changed{t, ref.ID})
		} else {
			b.marks.addNotShown(ref)
		}
		// Gone, or not visible yet: then its message lies within U of the tail.
		if b.steps <= 2 {
			b.notShown[ref] = readBack{m.Seq, m.Behind}
		}
		return false
	case s.Pending:
		if b.oldest.Seq == 0 || m.Seq < b.oldest.Seq {
			b.oldest = m
		}
		return true
	case s.ProcessedAt.IsZero():
		return false
	}
	if b.steps == 1 {
		b.marks.lowerT(m.Stored, s.ProcessedAt)
	}
	return b.marks.add(ref, s.ProcessedAt)
}
