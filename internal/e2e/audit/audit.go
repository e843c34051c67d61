// Package audit compares an outbox table with the stream it was relayed into:
// every row that is to be there once, with its own content, in its aggregate's
// order, and nothing else.
//
// [ReadTable] and [Reader] fetch the two sides, [Compare] is pure.
package audit

import (
	"github.com/walpost/walpost/outbox"
)

// Row is a committed row of the outbox.
type Row struct {
	Ref       outbox.Ref
	Aggregate string
	// Order is the row's place in its aggregate, in commit order. Gaps mean
	// nothing.
	Order   int64
	Payload string
	// Pending: the row is not marked as stored.
	Pending bool
}

// Message is a message of the stream.
type Message struct {
	Seq uint64
	// Own is set where the message id is one of the source that was asked for;
	// ID is the zero value otherwise.
	Own bool
	ID  outbox.MessageID
	// RawID is the Nats-Msg-Id as it stands.
	RawID    string
	Position outbox.Position
	// Polled: the table's poller has published it, not the WAL's reader.
	Polled bool
	Body   string
}

// Compare holds the stream's messages, in the stream's order, against the
// table's rows, in any order.
func Compare(rows []Row, messages []Message) Report {
	c := comparison{
		rows:  make(map[key]*tally, len(rows)),
		heads: map[string]head{},
	}
	c.report.Rows, c.report.Messages = len(rows), len(messages)
	for i := range rows {
		r := &rows[i]
		c.rows[keyOf(r.Ref)] = &tally{row: r}
		if r.Pending {
			c.report.Unmarked.add("%s", r.Ref)
		}
	}
	for i := range messages {
		c.message(&messages[i])
	}
	for i := range rows {
		if c.rows[keyOf(rows[i].Ref)].seq == 0 {
			c.report.Lost.add("%s (number %d of %s)", rows[i].Ref, rows[i].Order, rows[i].Aggregate)
		}
	}
	return c.report
}

type key struct {
	table, id string
	hash      uint64
}

func keyOf(r outbox.Ref) key { return key{r.Table.String(), r.ID, r.Hash} }

// tally is a row and the sequence of the first message that carries it.
type tally struct {
	row *Row
	seq uint64
}

// head is the newest row of an aggregate that the stream has shown.
type head struct {
	order int64
	seq   uint64
}

type comparison struct {
	report Report
	rows   map[key]*tally
	heads  map[string]head
	last   *Message // the last own one with a position
}

func (c *comparison) message(m *Message) {
	var t *tally
	if m.Own {
		t = c.rows[key{m.ID.Table, m.ID.ID, m.ID.Hash}]
	}
	if t == nil {
		c.report.Unknown.add("sequence %d: %s %.200s", m.Seq, m.RawID, m.Body)
		return
	}
	c.position(m)
	if t.seq != 0 {
		c.report.Duplicated.add("%s at sequences %d and %d", t.row.Ref, t.seq, m.Seq)
		return
	}
	t.seq = m.Seq
	if m.Body != t.row.Payload {
		c.report.Altered.add("%s at sequence %d: %.200s, want %.200s",
			t.row.Ref, m.Seq, m.Body, t.row.Payload)
	}
	c.order(t.row, m.Seq)
}

func (c *comparison) order(r *Row, seq uint64) {
	newest, seen := c.heads[r.Aggregate]
	if seen && r.Order <= newest.order {
		c.report.Reordered.add("%s, number %d of %s, at sequence %d, after number %d at %d",
			r.Ref, r.Order, r.Aggregate, seq, newest.order, newest.seq)
		return
	}
	c.heads[r.Aggregate] = head{r.Order, seq}
}

// position sees that the positions rise: the WAL's order is one for all
// aggregates. The poller repeats the last one.
func (c *comparison) position(m *Message) {
	if m.Position.SystemID == "" {
		c.report.Regressed.add("sequence %d has no position", m.Seq)
		return
	}
	if c.last != nil && regressed(c.last, m) {
		c.report.Regressed.add("sequence %d is at %s, sequence %d before it at %s",
			m.Seq, m.Position, c.last.Seq, c.last.Position)
	}
	c.last = m
}

// regressed reports whether a message's position is not behind that of the last one, where they can be
// compared. A polled message may repeat the last one's.
func regressed(last, m *Message) bool {
	p := last.Position
	return p.SystemID == m.Position.SystemID && p.Timeline == m.Position.Timeline &&
		p.Covers(m.Position.Commit, m.Position.N) && (!m.Polled || p.Commit != m.Position.Commit)
}
