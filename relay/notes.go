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
	// of are deliveries of its rows under the same ids to this stream, whatever their shards and conditions
	// are: the one that covers this relay's rows and was compared last, if there is one, and those that ended
	// later.
	of   []*span
	last uint64 // the least of the sequences up to which they are settled
	// endedAt is when the relay's own ended, as the table's marks have it; zero where that is not known.
	endedAt time.Time
}

// span is the last session of a delivery, or what is known of it.
type span struct {
	read outbox.MessageID
	seq  uint64    // of it
	at   time.Time // when JetStream stored it: others may publish its id
	last uint64    // the last sequence
	// proves: the message, if it is there, says that those before it are: it is the stream of the note, which
	// has not dropped it at its front, none of its newest messages was deleted, and the session that read it
	// compared all marks.
	proves bool
	// found: the message is where the session read it.
	found bool
	// covers: it is of all rows of this relay.
	covers bool
	// readAt and endedAt are times as the table's marks have them; zero where they are not known.
	readAt, endedAt time.Time
}

// notes are those of a relay's outboxes.
type notes struct {
	exists bool         // outbox_sent
	rows   []table.Sent // of it
	like   *Likenesses
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
	if err := s.stream.FindDeleted(ctx, info); err != nil {
		return nil, err
	}
	n := &notes{
		exists: exists, of: map[*outbox.Table]*note{}, elsewhere: map[*outbox.Table]bool{}, complete: true,
		like: s.form().Likenesses(s.outboxes, known, info),
	}
	for _, t := range s.outboxes {
		now := s.sent(t)
		n.take(t, &now, known, info, s.form().of(t, info))
		one := n.of[t]
		if one == nil {
			marked, err := db.HasMarks(ctx, t)
			n.complete = n.complete && exists && !marked && err == nil
			continue
		}
		if err := one.asMarks(ctx, db, t); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// asMarks makes of the note's times what marks of the table would be that were made then.
func (n *note) asMarks(ctx context.Context, db *table.DB, t *outbox.Table) error {
	all := []*time.Time{&n.endedAt}
	for _, s := range n.of {
		all = append(all, &s.readAt, &s.endedAt)
	}
	times := make([]time.Time, len(all))
	for i, at := range all {
		times[i] = *at
	}
	marks, err := db.AsMarks(ctx, t, times)
	for i, at := range all {
		if err == nil && !at.IsZero() {
			*at = marks[i]
		}
	}
	return err
}

// take looks for an outbox in the rows of outbox_sent.
func (n *notes) take(
	t *outbox.Table, now *table.Sent, known []table.Sent, info *jetstream.StreamInfo, next publish.Form,
) {
	var own *table.Sent
	var others, here []table.Sent
	for _, k := range known {
		is := k.SameDelivery(now)
		if is {
			k.Forms = formsOf(&k, next, info)
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
	n.of[t] = noteOf(now, here, info)
	if own != nil && own.EndedAt != nil {
		n.of[t].endedAt = *own.EndedAt
	}
}

func noteOf(now *table.Sent, here []table.Sent, info *jetstream.StreamInfo) *note {
	n := &note{last: math.MaxUint64}
	for _, k := range latest(now, here) {
		s := spanOf(&k, info)
		n.last = min(n.last, s.last)
		s.covers = k.Covers(now)
		n.of = append(n.of, s)
	}
	return n
}

// latest are the one of the deliveries that covers another and was compared with the stream last, and those
// that ended later: what was marked by the others was compared then. It is all of them where none covers it.
func latest(now *table.Sent, here []table.Sent) []table.Sent {
	var compared time.Time
	for _, k := range here {
		if k.Covers(now) && k.ReadAt != nil && k.ReadAt.After(compared) {
			compared = *k.ReadAt
		}
	}
	return slices.DeleteFunc(here, func(k table.Sent) bool {
		return k.EndedAt != nil && k.EndedAt.Before(compared)
	})
}

// isOf reports whether a delivery's last session wrote to this stream, and not to another one of its name.
func isOf(s *table.Sent, info *jetstream.StreamInfo) bool {
	return s.StreamCreated != nil &&
		s.StreamCreated.Equal(info.Created.Truncate(time.Microsecond)) // as PostgreSQL has it
}

func spanOf(s *table.Sent, info *jetstream.StreamInfo) *span {
	n := &span{}
	if s.EndedAt != nil {
		n.endedAt = *s.EndedAt
	}
	if !isOf(s, info) {
		n.last = math.MaxUint64 // of another stream
		return n
	}
	n.seq, n.last = s.ReadSequence, s.LastSequence
	n.read, _ = outbox.ParseMessageID(s.Source, s.ReadMessage)
	if s.ReadStoredAt != nil {
		n.at = *s.ReadStoredAt
	}
	if s.ReadAt == nil {
		return n
	}
	n.readAt = *s.ReadAt
	whole := info.LastDeleted == 0 || info.LastDeleted+jetstream.U <= info.LastSeq
	n.found = whole && s.ReadMessage == "" && s.ReadSequence <= info.LastSeq
	n.proves = n.found || whole && s.ReadSequence >= info.FirstSeq
	return n
}

// certain reports whether the notes say how far back the messages of every outbox may be.
func (n *notes) certain() bool {
	for _, one := range n.of {
		if one.last == math.MaxUint64 {
			return false
		}
	}
	return n.complete
}

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

// last is how far back the next session has to read as long as what this one has read back is not marked: to
// the least last sequence of the outboxes, at most seq. 0 is the beginning.
func (n *notes) last(of []*outbox.Table, seq uint64) uint64 {
	for _, t := range of {
		one := n.of[t]
		if one == nil { // nothing says where they are
			return 0
		}
		seq = min(seq, one.last)
	}
	return seq
}

// see takes each message of a read-back.
func (n *notes) see(m jetstream.Message) {
	for _, one := range n.of {
		for _, s := range one.of {
			if m.Seq == s.seq && s.proves {
				s.found = m.ID == s.read && m.Stored.Truncate(time.Microsecond).Equal(s.at)
			}
		}
	}
}

// enough reports whether a read-back may end with messages of which none is of this relay's outboxes. Where
// the message of a note is not in its place, those that are left of the outbox lie before it.
func (n *notes) enough(newest uint64) bool {
	for _, one := range n.of {
		if slices.ContainsFunc(one.of, func(s *span) bool { return s.proves && !s.found }) {
			return false
		}
	}
	return n.certain() && !n.wants(newest)
}

// marked are times between which the marks of a table are compared with the stream; an until that is zero
// bounds nothing.
type marked struct{ from, until time.Time }

// between are the times of the marks of a table that are compared with the stream, those since a time. What
// was marked before a message that is where a session read it was compared then; what was marked when no
// relay delivered to the stream is another's.
func (n *notes) between(t *outbox.Table, since time.Time) (all []marked) {
	one := n.of[t]
	switch {
	case one == nil && n.elsewhere[t]:
		// Nothing of it was delivered to this stream: the marks are of what was delivered elsewhere, and
		// messages of the outbox that are here are another shard's.
		return nil
	case one == nil:
		return []marked{{from: since}}
	}
	for _, s := range one.of {
		if s.found && s.covers && s.readAt.After(since) {
			since = s.readAt
		}
	}
	for _, s := range one.of {
		next := marked{since, s.endedAt}
		if s.found && s.readAt.After(since) {
			next.from = s.readAt
		}
		if next.until.IsZero() || !next.from.After(next.until) {
			all = append(all, next)
		}
	}
	slices.SortFunc(all, func(a, b marked) int { return a.from.Compare(b.from) })
	return joined(all)
}

// joined makes one of those that overlap. They are sorted by from.
func joined(all []marked) (apart []marked) {
	for _, next := range all {
		if len(apart) == 0 {
			apart = append(apart, next)
			continue
		}
		switch before := &apart[len(apart)-1]; {
		case before.until.IsZero():
		case next.from.After(before.until):
			apart = append(apart, next)
		case next.until.IsZero() || next.until.After(before.until):
			before.until = next.until
		}
	}
	return apart
}

// noteEvery is the least time between two notes of a session.
const noteEvery = time.Second

// noter writes the notes of a session. The session's start owns it, then the marker, then the session's end.
type noter struct {
	reporter *reporter
	db       *table.DB
	slot     string
	tables   []*outbox.Table
	exists   bool // outbox_sent
	rows     []table.Sent
	awaits   func() bool // that rows are shown which were read back; nil: none
	seq      uint64      // of the last note
	next     time.Time   // no note before
}

// begin notes the end of the stream that was read back, before the session marks a row, and ends what other
// relays of the outboxes have left open. It waits for locks: with an old note, marks of this session would
// be taken for another relay's.
func (n *noter) begin(ctx context.Context, read table.Noted, compared []table.Sent) error {
	if !n.exists {
		return nil
	}
	const kind = "table_locked/" + table.SentTable + "/"
	for begun := time.Now(); ; {
		err := n.db.EndOthers(ctx, n.rows)
		if err == nil {
			err = n.waitApart(ctx)
		}
		if err == nil {
			err = n.db.LeaveOut(ctx, n.rows, n.slot)
		}
		if err == nil {
			err = n.db.NoteRead(ctx, n.rows, read, compared)
		}
		if err == nil {
			n.seq = read.LastSequence
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

// waitApart waits until the session's marks tell it from others', where a column has whole seconds. It gives
// up after two: a column without a zone repeats an hour once a year.
func (n *noter) waitApart(ctx context.Context) error {
	begun := time.Now()
	for _, t := range n.tables {
		for apart := false; !apart && time.Since(begun) < 2*time.Second; {
			var err error
			if apart, err = n.db.Apart(ctx, t); err != nil {
				return err
			}
			if !apart && !sleep.For(ctx, 20*time.Millisecond) {
				return ctx.Err()
			}
		}
	}
	return nil
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

// note notes up to where messages are settled, where it is time for that.
func (n *noter) note(ctx context.Context, p *publish.Publisher) error {
	if seq, ok := n.settled(p); len(n.rows) == 0 || !ok || seq <= n.seq || time.Now().Before(n.next) {
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

// settled is up to where messages are settled, those of earlier sessions, too.
func (n *noter) settled(p *publish.Publisher) (uint64, bool) {
	seq, ok := p.Settled()
	return seq, ok && (n.awaits == nil || !n.awaits())
}

func (n *noter) write(ctx context.Context, p *publish.Publisher, ended bool) error {
	begun := time.Now()
	if seq, ok := n.settled(p); ok {
		n.seq = max(n.seq, seq)
	}
	err := n.db.NoteLast(ctx, n.rows, n.seq, ended)
	// A statement that is slow, or waits for a lock, holds up the marks.
	n.next = time.Now().Add(max(noteEvery, 100*time.Since(begun)))
	return err
}
