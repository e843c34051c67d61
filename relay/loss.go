package relay

import (
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// compareOnce compares, unless the session before this one has done so, and has ended because it
// had read the WAL for that.
func (b *reader) compareOnce() error {
	before := b.r.known.compared
	if b.r.known.compared = (compared{}); before.holds(b.info) {
		b.recovered.healed = before.healed
		return nil
	}
	err := b.compare()
	if b.inserts == nil {
		return err
	}
	b.inserts.stop()
	if err == nil {
		b.r.known.compared = compared{b.info, b.recovered.healed}
		err = errInsertsRead
	}
	return err
}

// compare looks for rows that carry a mark from the time that was read back and
// are not in the stream: JetStream has lost them.
func (b *reader) compare() error {
	if b.compared && b.since.IsZero() {
		if b.early > 0 {
			b.r.alarm("comparison_given_up", "the newest messages were stored long after their rows were marked, as where the clocks of the two servers are apart: "+
				"whether the stream has lost one of them is not known", zap.Int("rows", b.early), zap.Duration("apart", clocks))
		}
		return nil // every other row that was read back was pending until now
	}
	if b.givenUp {
		b.giveUp(b.since)
		return nil
	}
	for _, t := range b.r.cfg.Outboxes {
		compare := b.heal
		if b.from[t].IsZero() {
			compare = b.alarmUnreadable
		}
		if err := compare(t); err != nil {
			return err
		}
	}
	return nil
}

func (b *reader) giveUp(since time.Time) {
	b.r.alarm("comparison_given_up", "more rows carry late marks, or were changed, than are compared with the stream: whether it has lost one of them is not known",
		zap.Int("compared", len(b.refs)), zap.Time("marked_since", since))
}

// heal makes rows pending again that are marked and not in the stream. They are
// delivered from the table, before any WAL is read.
func (b *reader) heal(t *outbox.Table) error {
	since := b.since
	if from := b.from[t]; from.After(since) {
		since = from
	}
	if b.trimmed { // of the rows that were marked together at that time, some may have been dropped
		since = since.Add(time.Microsecond)
	}
	var next fallback.MarkCursor
	var first, last string
	lost, rewritten := 0, 0
	for {
		marked, err := b.db.MarkedSince(b.ctx, t, since, &next, settleBatch)
		if err != nil {
			return err
		}
		gone := slices.DeleteFunc(slices.Clone(marked), func(row fallback.MarkedRow) bool {
			if _, ok := b.refs[row.Ref]; ok {
				return true
			}
			_, ok := b.changed[changed{t, row.ID}]
			if ok {
				rewritten++
			}
			return ok
		})
		gone, full, err := b.leaveInserted(t, gone)
		if err != nil {
			return err
		}
		if full {
			b.giveUp(since)
			return nil
		}
		if len(gone) > 0 {
			if lost == 0 {
				first = gone[0].ID
				if err := b.confirm(); err != nil {
					return err
				}
			}
			lost, last = lost+len(gone), gone[len(gone)-1].ID
			if err := b.unmark(t, gone); err != nil {
				return err
			}
			crash("unmarked")
		}
		if len(marked) < settleBatch {
			break
		}
	}
	if rewritten > 0 && !b.r.limited("rows_changed/"+t.String(), time.Hour) {
		b.r.alarm("rows_changed", "marked rows are not what the stream holds under their ids: they were changed after they had been stored, "+
			"or their ids were used again; whether the stream has lost one of them cannot be told", zapTable(t), zap.Int("rows", rewritten))
	}
	if lost == 0 {
		return nil
	}
	b.recovered.healed += lost
	b.r.metrics.lost.Add(float64(lost))
	b.r.alarm("events_lost", "rows are marked as stored, but the stream does not hold them: JetStream has lost them, and they are delivered again",
		zapTable(t), zap.Int("rows", lost), zap.String("first_id", first), zap.String("last_id", last))
	return nil
}

// confirm fails unless what was read back was the stream's end: rows look lost where a
// leader has answered that was cut off from the others.
func (b *reader) confirm() error {
	info, err := b.r.stream.Confirm(b.ctx)
	if err != nil {
		return err
	}
	if !info.Created.Equal(b.info.Created) || info.LastSeq < b.info.LastSeq {
		return errors.New("read the stream back: it is another one, or has lost messages, since")
	}
	more := jetstream.ReadBackOptions{Source: b.r.envelope.Source(), Step: func(messages []jetstream.Message) (bool, error) {
		if len(messages) > 0 {
			return false, errors.New("read the stream back: it did not end where its leader said")
		}
		return true, nil
	}}
	return b.r.stream.ReadOn(b.ctx, b.info.LastSeq+1, info.LastSeq, more)
}

// unmark waits for rows that somebody has locked: nothing of their aggregates may
// be delivered before them.
func (b *reader) unmark(t *outbox.Table, rows []fallback.MarkedRow) error {
	for begun, named := time.Now(), false; ; {
		_, left, err := b.db.Unmark(b.ctx, t, rows)
		switch {
		case err != nil && (!fallback.Passing(err) || !b.db.Alive()):
			return err
		case err != nil:
			b.r.trouble("rows that the stream has lost cannot be made pending: trying again", err, zapTable(t))
		case len(left) == 0:
			return nil
		default:
			rows = left
			if !named && time.Since(begun) > lockedAlarm {
				named = true
				who, err := b.db.Blocker(b.ctx, t, rows[0].ID)
				if err != nil {
					who = err.Error()
				}
				b.r.alarm("row_locked", "a row that the stream has lost cannot be made pending: nothing is delivered before it",
					zap.Stringer("row", rows[0].Ref), zap.String("holder", who))
			}
		}
		if !sleep(b.ctx, 200*time.Millisecond) {
			return b.ctx.Err()
		}
	}
}

// alarmUnreadable: the table has marks of the time that was read back, and no message
// of one of its rows was.
func (b *reader) alarmUnreadable(t *outbox.Table) error {
	marked, err := b.db.MarkedSince(b.ctx, t, b.since, &fallback.MarkCursor{}, 1) // archived ones are not compared
	if err != nil || len(marked) == 0 {
		return err
	}
	b.r.alarm("nothing_to_compare", "rows are marked as stored, but none of the stream's messages can be compared with them: "+
		"the stream was emptied, has expired, or is not the one they were stored in, as where another relay had the table before", zapTable(t))
	return nil
}

// compared is a stream that was compared with the tables, and how many rows it had lost.
type compared struct {
	stream *jetstream.StreamInfo
	healed int
}

// holds reports whether the stream is the one that was compared, and has lost nothing since, as far as
// can be seen.
func (c compared) holds(info *jetstream.StreamInfo) bool {
	return c.stream != nil && info.Created.Equal(c.stream.Created) && info.LastSeq >= c.stream.LastSeq
}
