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
	table.Sent
	read outbox.MessageID
	// proves: a message that is found says that those before it are there: it is the stream of the note, no
	// message was deleted from it, and the session that read it compared all marks.
	proves bool
	// found: the message is where the session read it.
	found bool
}

// notes are those of a relay's outboxes.
type notes struct {
	rows []table.Sent // of outbox_sent
	// of lacks outboxes that outbox_sent does not have, or of which nothing was noted yet.
	of map[*outbox.Table]*note
	// complete: of has all of them.
	complete bool
	// until is when the last one ended of the relays that have delivered the rows of an outbox under the same
	// ids to this stream, in whatever shards and conditions. There is none where one of them has not ended.
	until map[*outbox.Table]time.Time
	// elsewhere: the outbox was delivered to another stream or from another source.
	elsewhere map[*outbox.Table]bool
	// meanwhile: another relay has delivered rows of the outbox after this one had ended.
	meanwhile bool
}

func (s *servers) readNotes(ctx context.Context, db *table.DB, info *jetstream.StreamInfo) (*notes, error) {
	known, _, err := db.Sent(ctx, table.SentPrivileges)
	if err != nil {
		return nil, err
	}
	n := &notes{
		of:        map[*outbox.Table]*note{},
		until:     map[*outbox.Table]time.Time{},
		elsewhere: map[*outbox.Table]bool{},
	}
	for _, t := range s.cfg.Outboxes {
		n.take(t, s.sent(t), known, info)
	}
	n.complete = len(n.of) == len(s.cfg.Outboxes)
	return n, nil
}

// take looks for an outbox in the rows of outbox_sent.
func (n *notes) take(t *outbox.Table, now table.Sent, known []table.Sent, info *jetstream.StreamInfo) {
	var others []table.Sent
	open := false
	for _, k := range known {
		own := k.SameDelivery(&now)
		if own {
			n.rows = append(n.rows, k)
		}
		if !k.Overlaps(&now) || k.NotedAt == nil {
			continue
		}
		if own {
			n.of[t] = newNote(k, info)
		} else {
			others = append(others, k)
		}
		switch {
		case !k.SameMessages(&now):
			n.elsewhere[t] = true
		case k.EndedAt == nil:
			open = true
		case k.EndedAt.After(n.until[t]):
			n.until[t] = *k.EndedAt
		}
	}
	if open {
		delete(n.until, t)
	}
	one := n.of[t]
	n.meanwhile = n.meanwhile || slices.ContainsFunc(others, func(k table.Sent) bool {
		return one == nil || one.EndedAt != nil && (k.EndedAt == nil || k.EndedAt.After(*one.EndedAt))
	})
}

func newNote(s table.Sent, info *jetstream.StreamInfo) *note {
	n := &note{Sent: s}
	if !s.StreamCreated.Equal(info.Created.Truncate(time.Microsecond)) { // as PostgreSQL has it
		n.LastSequence = math.MaxUint64 // of another stream
		return n
	}
	n.proves = s.ReadAt != nil && info.Messages == info.LastSeq+1-info.FirstSeq
	n.read, _ = outbox.ParseMessageID(s.Source, s.ReadMessage)
	n.found = n.proves && s.ReadMessage == "" && s.ReadSequence <= info.LastSeq
	return n
}

// begins reports whether nothing of a delivery was noted yet, and the outbox was delivered elsewhere: then
// the table has the marks of that.
func (n *notes) begins(t *outbox.Table) bool { return n.of[t] == nil && n.elsewhere[t] }

// wants reports whether a read-back has to go on behind messages of which the newest has this sequence: a
// message of the outboxes may be behind those of others that later sessions have sent.
func (n *notes) wants(newest uint64) bool {
	for _, one := range n.of {
		if newest > one.LastSequence {
			return true
		}
	}
	return false
}

// look takes the messages of a read-back. It reports whether enough was read where none of them is of this
// relay's outboxes.
func (n *notes) look(messages []jetstream.Message) (enough bool) {
	newest, oldest := messages[0].Seq, messages[len(messages)-1].Seq
	enough = n.complete && !n.wants(newest)
	for _, one := range n.of {
		if one.proves && !one.found && one.ReadSequence >= oldest && one.ReadSequence <= newest {
			one.found = slices.ContainsFunc(messages, func(m jetstream.Message) bool {
				return m.Seq == one.ReadSequence && m.ID == one.read
			})
		}
		enough = enough && one.found
	}
	return enough
}

// between are the times of the marks of a table that are compared with the stream. What was marked before a
// message that is where a session read it was compared then; what was marked after the relay had ended is
// another's. An until that is zero bounds nothing. some is false where there is nothing to compare.
func (n *notes) between(t *outbox.Table, since time.Time) (from, until time.Time, some bool) {
	until = n.until[t]
	if one := n.of[t]; one != nil && one.found && one.ReadAt.After(since) {
		since = *one.ReadAt
	}
	return since, until, until.IsZero() || since.Before(until)
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
func (n *noter) begin(ctx context.Context, read table.Noted, compared bool) error {
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
