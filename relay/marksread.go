package relay

import (
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// mostCompared bounds the rows that a recovery keeps. The publisher runs at most U messages past an unmarked
// row, so marks that a relay has made reach back two steps. A variable for tests.
var mostCompared = 8 * jetstream.U

// clocks is how much the difference of the two servers' clocks may have changed since messages were stored.
// If the leader does not tell its time, mostApart is how far they may be apart.
const (
	clocks    = 10 * time.Second
	mostApart = time.Hour
)

// tableTimes are what is known of a table's marks.
type tableTimes struct {
	// ahead is how far JetStream's clock is ahead of the times of marks, at most.
	ahead time.Duration
	// oldest is the oldest mark in the table. Rows that were marked before may have been deleted.
	oldest time.Time
	stays  bool // marked rows do
}

// isOwn reports whether a row may have been marked for a message: not before that was stored. A mark from
// before is that of an earlier message, of which this one is a copy.
func (t *tableTimes) isOwn(stored, marked time.Time) bool {
	return !marked.Before(stored.Add(-t.ahead - clocks))
}

// mayBeGone reports whether the row of a message may have been deleted by now.
func (t *tableTimes) mayBeGone(stored time.Time) bool {
	return !t.stays || t.oldest.IsZero() || stored.Add(-t.ahead-clocks).Before(t.oldest)
}

// marksRead is what the backward scan keeps for the comparison of marks and stream.
type marksRead struct {
	// since is T: the earliest mark among the rows of the first step, whatever their table, because one
	// clock made them all.
	since time.Time
	// rows were read back and are marked at or after T.
	rows map[outbox.Ref]struct{}
	// notShown were read back, and their tables did not have them then: of at most mostCompared it is known
	// that they are not lost. Their partition may have come back since.
	notShown map[outbox.Ref]struct{}
	// first is the earliest mark among the rows of each table that were read back. Earlier marks of the
	// table may be another relay's, which had it before.
	first map[*outbox.Table]time.Time
	// changed are rows whose content differs from their messages', or other rows that have got their ids.
	changed map[changed]struct{}
	full    bool // more rows, or changed ones, were met than mostCompared
	early   int  // rows of the first step whose marks are older than their messages
	known   bool // a table still has one of the rows
}

type changed struct {
	table *outbox.Table
	id    string
}

func newMarksRead() *marksRead {
	return &marksRead{
		rows:     map[outbox.Ref]struct{}{},
		notShown: map[outbox.Ref]struct{}{},
		first:    map[*outbox.Table]time.Time{},
		changed:  map[changed]struct{}{},
	}
}

// lowerT takes a mark of the first step into account. own: it was made for the message.
func (m *marksRead) lowerT(own bool, at time.Time) {
	switch {
	case !own:
		m.early++
	case m.since.IsZero() || at.Before(m.since):
		m.since = at
	}
}

// add reports whether the row is marked at or after T, and keeps it then.
func (m *marksRead) add(ref outbox.Ref, at time.Time) bool {
	if first := m.first[ref.Table]; first.IsZero() || at.Before(first) {
		m.first[ref.Table] = at
	}
	switch {
	case m.since.IsZero() || at.Before(m.since):
		return false
	case len(m.rows) >= mostCompared:
		m.full = true
		return false
	}
	m.rows[ref] = struct{}{}
	return true
}

func (m *marksRead) addNotShown(ref outbox.Ref) {
	if len(m.notShown) < mostCompared {
		m.notShown[ref] = struct{}{}
	}
}

// wasRead reports whether the row's message was read, and is no lost one.
func (m *marksRead) wasRead(ref outbox.Ref) bool {
	_, marked := m.rows[ref]
	_, notShown := m.notShown[ref]
	return marked || notShown
}

func (m *marksRead) addChanged(c changed) {
	if len(m.changed) >= mostCompared {
		m.full = true
		return
	}
	m.changed[c] = struct{}{}
}

// sinceOf is the time from which every marked row of a table must have been read back.
func (m *marksRead) sinceOf(t *outbox.Table) time.Time {
	if first := m.first[t]; first.After(m.since) {
		return first
	}
	return m.since
}
