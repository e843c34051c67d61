package relay

import (
	"context"
	"math"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// note is what outbox_sent has of an outbox when a session begins.
type note struct {
	read outbox.MessageID
	seq  uint64 // of it
	last uint64 // the last sequence
	// proves: the message, if it is there, says that those before it are: it is the stream of the note, which
	// has not dropped it at its front, no message was deleted from it, and the session that read it compared
	// all marks.
	proves bool
	// found: the message is where the session read it.
	found bool
	// readAt and endedAt are times as the table's marks have them; zero where they are not known.
	readAt, endedAt time.Time
	// until is when the last one ended of the relays that have delivered the rows under the same ids to this
	// stream, in whatever shards and conditions; zero where one of them has not ended.
	until time.Time
}

// notes are those of a relay's outboxes.
type notes struct {
	rows []table.Sent // of outbox_sent
	// of lacks outboxes of which nothing was noted yet for this stream.
	of map[*outbox.Table]*note
	// complete: of the outboxes that of lacks, none has a marked row.
	complete bool
	// elsewhere: the outbox was delivered to another stream or from another source.
	elsewhere map[*outbox.Table]bool
	// meanwhile: another relay has delivered rows of an outbox after this one had ended.
	meanwhile bool
}

func (s *servers) readNotes(ctx context.Context, db *table.DB, info *jetstream.StreamInfo) (*notes, error) {
	known, exists, err := db.Sent(ctx, table.SentPrivileges)
	if err != nil {
		return nil, err
	}
	n := &notes{of: map[*outbox.Table]*note{}, elsewhere: map[*outbox.Table]bool{}, complete: true}
	for _, t := range s.cfg.Outboxes {
		now := s.sent(t)
		n.take(t, &now, known, info)
		one := n.of[t]
		if one == nil {
			marked, err := db.HasMarks(ctx, t)
			n.complete = n.complete && exists && !marked && err == nil
			continue
		}
		times := []time.Time{one.readAt, one.endedAt, one.until}
		marks, err := db.AsMarks(ctx, t, times)
		if err != nil {
			return nil, err
		}
		for i, at := range []*time.Time{&one.readAt, &one.endedAt, &one.until} {
			if !at.IsZero() {
				*at = marks[i]
			}
		}
	}
	return n, nil
}

// take looks for an outbox in the rows of outbox_sent.
func (n *notes) take(t *outbox.Table, now *table.Sent, known []table.Sent, info *jetstream.StreamInfo) {
	var own *table.Sent
	var others, here []table.Sent
	for _, k := range known {
		is := k.SameDelivery(now)
		if is {
			n.rows = append(n.rows, k)
		}
		if !k.Overlaps(now) || k.NotedAt == nil {
			continue
		}
		if is {
			own = &k
		} else {
			others = append(others, k)
		}
		if k.SameMessages(now) {
			here = append(here, k)
		} else {
			n.elsewhere[t] = true
		}
	}
	n.meanwhile = n.meanwhile || slices.ContainsFunc(others, func(k table.Sent) bool {
		return own == nil || own.EndedAt != nil && (k.EndedAt == nil || k.EndedAt.After(*own.EndedAt))
	})
	if len(here) == 0 {
		return
	}
	one := &note{until: lastEnd(here)}
	if own != nil {
		one.take(own, info)
	} else { // its messages are where those of the others were
		one.last = math.MaxUint64
		for i := range here {
			other := &note{}
			other.take(&here[i], info)
			one.last = min(one.last, other.last)
		}
	}
	n.of[t] = one
}

// lastEnd is when the last of them ended; zero where one has not.
func lastEnd(of []table.Sent) (end time.Time) {
	for _, k := range of {
		if k.EndedAt == nil {
			return time.Time{}
		}
		if k.EndedAt.After(end) {
			end = *k.EndedAt
		}
	}
	return end
}

func (n *note) take(s *table.Sent, info *jetstream.StreamInfo) {
	if s.EndedAt != nil {
		n.endedAt = *s.EndedAt
	}
	if !s.StreamCreated.Equal(info.Created.Truncate(time.Microsecond)) { // as PostgreSQL has it
		n.last = math.MaxUint64 // of another stream
		return
	}
	n.seq, n.last = s.ReadSequence, s.LastSequence
	n.read, _ = outbox.ParseMessageID(s.Source, s.ReadMessage)
	if s.ReadAt == nil {
		return
	}
	n.readAt = *s.ReadAt
	whole := info.Messages == info.LastSeq+1-info.FirstSeq
	n.found = whole && s.ReadMessage == "" && s.ReadSequence <= info.LastSeq
	n.proves = n.found || whole && s.ReadSequence >= info.FirstSeq
}

// begins reports whether nothing of an outbox was delivered to this stream, and something elsewhere: then the
// table has the marks of that.
func (n *notes) begins(t *outbox.Table) bool { return n.of[t] == nil && n.elsewhere[t] }

// wants reports whether a read-back has to go on behind messages of which the newest has this sequence: a
// message of the outboxes may be behind those of others that later sessions have sent.
func (n *notes) wants(newest uint64) bool {
	for _, one := range n.of {
		if newest > one.last {
			return true
		}
	}
	return false
}

// see takes each message of a read-back.
func (n *notes) see(m jetstream.Message) {
	for _, one := range n.of {
		if m.Seq == one.seq && one.proves {
			one.found = m.ID == one.read
		}
	}
}

// enough reports whether a read-back may end with messages of which none is of this relay's outboxes. Where
// the message of a note is not in its place, those that are left of the outbox lie before it.
func (n *notes) enough(newest uint64) bool {
	for _, one := range n.of {
		if one.proves && !one.found {
			return false
		}
	}
	return n.complete && !n.wants(newest)
}

// between are the times of the marks of a table that are compared with the stream. What was marked before a
// message that is where a session read it was compared then; what was marked after the relay had ended is
// another's. An until that is zero bounds nothing. some is false where there is nothing to compare.
func (n *notes) between(t *outbox.Table, since time.Time) (from, until time.Time, some bool) {
	one := n.of[t]
	if one == nil {
		return since, until, true
	}
	if one.found && one.readAt.After(since) {
		since = one.readAt
	}
	return since, one.until, one.until.IsZero() || !since.After(one.until)
}

// noteEvery is the least time between two notes of a session.
const noteEvery = time.Second

// noter writes the notes of a session. The session's start owns it, then the marker, then the session's end.
type noter struct {
	reporter *reporter
	db       *table.DB
	rows     []table.Sent
	seq      uint64    // of the last note
	next     time.Time // no note before
}

// begin notes the end of the stream that was read back, before the session marks a row, and ends what other
// relays of the outboxes have left open. It waits for locks: with an old note, marks of this session would
// be taken for another relay's.
func (n *noter) begin(ctx context.Context, read table.Noted, compared []table.Sent) error {
	if len(n.rows) == 0 {
		return nil
	}
	const kind = "table_locked/" + table.SentTable + "/"
	for begun := time.Now(); ; {
		err := n.db.EndOthers(ctx, n.rows)
		if err == nil {
			err = n.db.LeaveOut(ctx, n.rows)
		}
		if err == nil {
			err = n.db.NoteRead(ctx, n.rows, read, compared)
		}
		if err == nil {
			n.seq = read.ReadSequence
			n.reporter.over(kind, alarm.RowLocked)
			return nil
		}
		if !waitsOut(err) || !n.db.Alive() {
			return err
		}
		n.reporter.trouble("the session's begin cannot be noted: trying again", err)
		if table.IsLocked(err) && time.Since(begun) > lockedAlarm {
			n.alarmLocked(ctx, kind)
		}
		if !sleep.For(ctx, 200*time.Millisecond) {
			return ctx.Err()
		}
	}
}

// alarmLocked names who has a lock on outbox_sent, every 30 seconds.
func (n *noter) alarmLocked(ctx context.Context, kind string) {
	if n.reporter.limited(kind, 30*time.Second) {
		return
	}
	who, err := n.db.SentBlocker(ctx)
	if err != nil {
		who = err.Error()
	}
	n.reporter.alarm(alarm.RowLocked, zap.String("waiting", "the relay's start"),
		zap.String("table", table.SentTable), zap.String("holder", who))
}

// note notes the greatest sequence that was stored, where it is time for that.
func (n *noter) note(ctx context.Context, p *publish.Publisher) error {
	if len(n.rows) == 0 || p.LastSeq() <= n.seq || time.Now().Before(n.next) {
		return nil
	}
	return n.write(ctx, p, false)
}

// end notes that the session has ended. Nothing is marked after it.
func (n *noter) end(ctx context.Context, p *publish.Publisher) error {
	if len(n.rows) == 0 || !n.db.Alive() {
		return nil
	}
	return n.write(ctx, p, true)
}

func (n *noter) write(ctx context.Context, p *publish.Publisher, ended bool) error {
	begun := time.Now()
	n.seq = p.LastSeq()
	err := n.db.NoteLast(ctx, n.rows, n.seq, ended)
	// A statement that is slow, or waits for a lock, holds up the marks.
	n.next = time.Now().Add(max(noteEvery, 100*time.Since(begun)))
	return err
}
