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
//
// Others may publish messages with the relay's ids. So copies of earlier messages do not count towards a
// step, nor do messages without a row, unless the row may have been deleted.
type backwardScan struct {
	rows  *messageRows
	notes *notes
	times map[*outbox.Table]*tableTimes
	found jetstream.Found
	step  int  // the present one, from 1
	count int  // of its messages, so far
	asks  bool // it asks for another one
	over  bool // a whole step did not
	more  bool // the last one that was looked at did
	// oldest is the oldest message whose row is pending; Seq is 0 without one.
	oldest   jetstream.Message
	marks    *marksRead
	notShown map[outbox.Ref]readBack // see recoveryState
	bytes    int                     // of ids of rows that are not shown
	// none: no transaction is open any more that was when a message was stored, so a row that is not shown is
	// gone.
	none bool
	full bool // more rows were not shown than are remembered
}

// These bound the rows that are not shown, and their ids, in bytes: anybody who may publish chooses them.
const (
	mostNotShownRows = 4 * jetstream.U
	mostNotShown     = 16 << 20
)

func scanBackward(
	ctx context.Context, from *jetstream.Stream, rows *messageRows, n *notes,
	times map[*outbox.Table]*tableTimes, info *jetstream.StreamInfo, none bool, o jetstream.ScanOptions,
) (*backwardScan, error) {
	b := &backwardScan{
		rows: rows, notes: n, times: times, step: 1, marks: newMarksRead(),
		notShown: map[outbox.Ref]readBack{}, none: none,
	}
	o.Step = func(messages []jetstream.Message) (bool, error) { return b.take(ctx, messages) }
	var err error
	b.found, err = from.ScanBackward(ctx, info.FirstSeq, info.LastSeq, o)
	return b, err
}

// take looks at up to U messages, the newest first, and reports whether the pass has to go on.
func (b *backwardScan) take(ctx context.Context, messages []jetstream.Message) (more bool, err error) {
	if !slices.ContainsFunc(messages, b.rows.has) && slices.ContainsFunc(messages, b.rows.isOther) {
		b.more = !b.notes.enough(messages[0].Seq)
		return b.more, nil
	}
	if b.notes.certain() { // else others could end the pass with ids of replays and of other tables
		for _, m := range messages {
			if b.rows.isOther(m) {
				b.counted(m)
			}
		}
	}
	err = b.rows.each(ctx, messages, func(batch rowBatch) error {
		for i, s := range batch.states {
			if b.look(batch.table, batch.messages[i], batch.rows[i].Ref, s) {
				b.counted(batch.messages[i])
			}
		}
		return nil
	})
	if b.count > 0 {
		b.more = b.asks
	}
	return !b.over, err
}

// counted counts a message towards the step.
func (b *backwardScan) counted(m jetstream.Message) {
	b.asks = b.asks || b.notes.wants(m.Seq)
	if b.count++; b.count < jetstream.U {
		return
	}
	b.more, b.over = b.asks, b.over || !b.asks
	b.step, b.count, b.asks = b.step+1, 0, false
}

// look takes a message, and reports whether it counts. It asks for another step if its row is pending, or
// marked at or after T.
func (b *backwardScan) look(
	t *outbox.Table, m jetstream.Message, ref outbox.Ref, s table.State,
) (counts bool) {
	times := b.times[t]
	b.marks.known = b.marks.known || s.Exists
	own := s.Pending || s.ProcessedAt.IsZero() || times.isOwn(m.Stored, s.ProcessedAt)
	counts = s.Exists && own || !s.Exists && times.mayBeGone(m.Stored)
	switch {
	case !s.Exists || !s.Same:
		if b.bytes += len(ref.ID); b.bytes > mostNotShown {
			b.full = true
			return counts
		}
		if s.Exists {
			b.marks.addChanged(changed{t, ref.ID})
		} else {
			b.marks.addNotShown(ref)
		}
		switch { // gone, or not visible yet
		case b.none && !t.Partitioned:
		case len(b.notShown) < mostNotShownRows:
			b.notShown[ref] = readBack{m.Seq, m.Behind}
		default:
			b.full = true
		}
	case s.Pending:
		if b.oldest.Seq == 0 || m.Seq < b.oldest.Seq {
			b.oldest = m
		}
		b.asks = true
	case s.ProcessedAt.IsZero():
	default:
		if b.step == 1 {
			b.marks.lowerT(own, s.ProcessedAt)
		}
		b.asks = b.marks.add(ref, s.ProcessedAt) || b.asks
	}
	return counts
}
