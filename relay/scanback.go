package relay

import (
	"context"
	"slices"
	"time"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// mostCompared bounds the rows that a read-back keeps. The lane runs at most U messages past an unmarked
// row, so marks that a relay has made reach back two steps. A variable for tests.
var mostCompared = 8 * jetstream.U

// clocks is how far the two servers' clocks may be apart. A mark from longer before its message was
// stored is no relay's, and would have everything since then read.
const clocks = time.Hour

// reader is one read-back at work.
type reader struct {
	r         *Relay
	info      *jetstream.StreamInfo
	db        *fallback.DB
	wal       *stream.Session // nil where none is read
	ctx       context.Context
	tables    map[string]*outbox.Table
	recovered *recoveryState
	// refs are the rows that were read back and are marked no earlier than since
	// (T), the earliest mark among the rows of the first step, whatever their
	// table: one clock made them all. compared is set where a table still has
	// one of the rows.
	refs     map[outbox.Ref]struct{}
	givenUp  bool // there are more than mostCompared, or more changed ones
	early    int  // rows of the first step whose marks are no relay's, see clocks
	compared bool
	// from is the earliest mark among the rows of each table that were read back.
	// Earlier marks of the table may be another relay's, which had it before.
	from map[*outbox.Table]time.Time
	// changed are rows that the table shows otherwise than their messages do, or other
	// ones that have got their ids.
	changed map[changed]struct{}
	since   time.Time
	stepNo  int
	// wanted is set where the last step asked for another one; trimmed, where the
	// stream had none because it has dropped its oldest messages.
	wanted, trimmed bool
	inserts         *inserts // nil where the WAL was not asked
	// oldest is the oldest message whose row is pending; Seq is 0 without one.
	// passed counts the messages on the way on from it.
	oldest jetstream.Message
	passed uint64
}

type changed struct {
	table *outbox.Table
	id    string
}

// look is the way back: it finds out how far the read-back has to go.
func (b *reader) look(messages []jetstream.Message) (more bool, err error) {
	if b.stepNo++; b.stepNo == 1 {
		for _, m := range messages {
			if t := b.tables[m.ID.Table]; t != nil && t.Mark == outbox.MarkNone {
				b.recovered.sent[outbox.Ref{Table: t, ID: m.ID.ID, Hash: m.ID.Hash}] = struct{}{}
			}
		}
		b.recovered.sentFrom = messages[len(messages)-1].Position
	}
	err = b.each(messages, func(t *outbox.Table, ms []jetstream.Message, rows []fallback.Row, states []fallback.State) error {
		for i, s := range states {
			more = b.note(t, ms[i], rows[i].Ref, s) || more
		}
		return nil
	})
	b.wanted = more
	return more, err
}

// note reports whether a row asks for another step: it is pending, or marked no
// earlier than the oldest of the first step.
func (b *reader) note(t *outbox.Table, m jetstream.Message, ref outbox.Ref, s fallback.State) bool {
	b.compared = b.compared || s.Exists
	switch {
	case !s.Exists || !s.Same:
		switch full := len(b.changed) >= mostCompared; {
		case s.Exists && full:
			b.givenUp = true
		case s.Exists:
			b.changed[changed{t, ref.ID}] = struct{}{}
		}
		// Gone, or not visible yet: then its message lies within U of the tail.
		if b.stepNo <= 2 {
			b.recovered.notShown[ref] = m.Behind
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
	if from := b.from[t]; from.IsZero() || s.ProcessedAt.Before(from) {
		b.from[t] = s.ProcessedAt
	}
	switch {
	case b.stepNo > 1:
	case !s.ProcessedAt.After(m.Stored.Add(-clocks)):
		b.early++
	case b.since.IsZero() || s.ProcessedAt.Before(b.since):
		b.since = s.ProcessedAt
	}
	if b.since.IsZero() || s.ProcessedAt.Before(b.since) {
		return false
	}
	if len(b.refs) >= mostCompared {
		b.givenUp = true
		return false
	}
	b.refs[ref] = struct{}{}
	return true
}

// each asks the tables about the rows of messages, in batches and in the
// messages' order.
func (b *reader) each(messages []jetstream.Message, do func(*outbox.Table, []jetstream.Message, []fallback.Row, []fallback.State) error) error {
	for part := range slices.Chunk(messages, settleBatch) {
		for t, ms := range b.byTable(part) {
			rows := make([]fallback.Row, len(ms))
			for i, m := range ms {
				rows[i] = fallback.Row{Ref: outbox.Ref{Table: t, ID: m.ID.ID, Hash: m.ID.Hash}, Bytes: m.Bytes}
			}
			states, err := b.lookUp(t, rows)
			if err != nil {
				return err
			}
			if err := do(t, ms, rows, states); err != nil {
				return err
			}
		}
	}
	return nil
}

// byTable sorts out the messages whose rows can be asked for.
func (b *reader) byTable(messages []jetstream.Message) map[*outbox.Table][]jetstream.Message {
	sorted := map[*outbox.Table][]jetstream.Message{}
	for _, m := range messages {
		if t := b.tables[m.ID.Table]; t != nil && t.Mark != outbox.MarkNone && !m.ID.Replay {
			sorted[t] = append(sorted[t], m)
		}
	}
	return sorted
}

func (b *reader) lookUp(t *outbox.Table, rows []fallback.Row) ([]fallback.State, error) {
	for {
		states, err := b.db.LookUp(b.ctx, t, rows)
		if err == nil || !fallback.Passing(err) || !b.db.Alive() {
			return states, err
		}
		b.r.trouble("rows that were read back cannot be looked up: trying again", err, zapTable(t))
		if !sleep(b.ctx, 200*time.Millisecond) {
			return nil, b.ctx.Err()
		}
	}
}
