package outbox

import "time"

// Event is one INSERT into an outbox table, committed in the WAL or selected
// from the table.
//
// Values alias the buffer that they were read from: they are valid until the
// event's reader is called again, and [Event.Clone] copies them.
type Event struct {
	Table *Table
	// XID is the inserting transaction's id, without its epoch.
	XID uint32
	// Commit is the LSN of the transaction's commit record, CommitTime the
	// commit timestamp, N the ordinal of the INSERT in its transaction.
	Commit     LSN
	CommitTime time.Time
	N          uint32
	// Values holds every mapped column's text as PostgreSQL's output function
	// renders it; nil is NULL or not mapped.
	Values [NumFields][]byte
	// Omitted names the values that are too long for any message and were not kept:
	// they are empty in Values. Only fields up to LastHeader are named. Nearly always nil.
	Omitted []Omitted
}

// Omitted is a value that was not kept, and its length as text, in bytes.
type Omitted struct {
	Field Field
	Size  int
}

// MostAttribute is the longest value that is kept of a field that becomes a header or
// part of a subject, in bytes.
const MostAttribute = 64 << 10

// Most is the longest value that is kept of a field, in bytes, where a payload may have
// so many. A row is found by its id, also one that no header can hold.
func (f Field) Most(payload int) int {
	switch f {
	case Payload:
		return payload
	case ID:
		return 1 << 20
	}
	return MostAttribute
}

// MostText is the length of a text that the server cannot render: it has this or more.
const MostText = 1 << 30

// Omit notes that a field's value was not kept.
func (e *Event) Omit(f Field, size int) {
	e.Values[f] = []byte{}
	if f <= LastHeader {
		e.Omitted = append(e.Omitted, Omitted{f, size})
	}
}

// Ref names the row for ever: its table, its id, and the hash of its content.
func (e *Event) Ref() Ref {
	return Ref{Table: e.Table, ID: string(e.Values[ID]), Hash: e.Hash()}
}

// Size is the number of bytes that the values occupy.
func (e *Event) Size() int {
	n := 0
	for _, v := range e.Values {
		n += len(v)
	}
	return n
}

// Clone copies the event and its values, in one allocation.
func (e *Event) Clone() *Event {
	c := &Event{}
	e.CopyTo(c, nil)
	return c
}

// CopyTo is Clone into an event whose values are in buf. It returns buf, or a larger one in its place.
func (e *Event) CopyTo(c *Event, buf []byte) []byte {
	if n := e.Size(); buf == nil || cap(buf) < n { // an empty value is not NULL
		buf = make([]byte, 0, n)
	}
	buf = buf[:0]
	*c = *e
	for i, v := range e.Values {
		if v == nil {
			continue
		}
		start := len(buf)
		buf = append(buf, v...)
		c.Values[i] = buf[start:len(buf):len(buf)]
	}
	return buf
}
