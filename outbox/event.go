package outbox

import (
	"strconv"
	"time"
)

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
}

// Ref names the row for ever: its table, its id, and the hash of its content.
func (e *Event) Ref() Ref {
	return Ref{Table: e.Table, ID: string(e.Values[ID]), Hash: e.Hash()}
}

// Aggregate is the key of the aggregate that the row belongs to; "" where it
// belongs to none. It is unique in its table.
func (e *Event) Aggregate() string {
	return AggregateKey(e.Values[TenantID], e.Values[AggregateType], e.Values[AggregateID])
}

// AggregateKey joins what names an aggregate; nil is NULL or not mapped. Rows
// without an aggregate id belong to none.
func AggregateKey(tenant, kind, id []byte) string {
	if id == nil {
		return ""
	}
	key := make([]byte, 0, len(tenant)+len(kind)+len(id)+8)
	for _, v := range [][]byte{tenant, kind} {
		if v != nil {
			key = strconv.AppendInt(key, int64(len(v)), 10)
			key = append(key, ':')
			key = append(key, v...)
		}
		key = append(key, '/')
	}
	return string(append(key, id...))
}

// Size is the number of bytes that the values occupy.
func (e *Event) Size() int {
	n := 0
	for _, v := range e.Values {
		n += len(v)
	}
	return n
}

// Clone copies the event into memory of its own, in one allocation.
func (e *Event) Clone() *Event {
	c := *e
	buf := make([]byte, 0, e.Size())
	for i, v := range e.Values {
		if v == nil {
			continue
		}
		start := len(buf)
		buf = append(buf, v...)
		c.Values[i] = buf[start:len(buf):len(buf)]
	}
	return &c
}
