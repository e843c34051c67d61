package decode

import (
	"errors"
	"fmt"
	"time"

	"github.com/walpost/walpost/outbox"
)

// Kind says what a message means to an outbox.
type Kind uint8

const (
	// Other is everything that is not an outbox event or the edge of a
	// transaction: relations, types, origins, logical messages, updates,
	// deletes, truncates, and inserts into tables that are not ours.
	Other Kind = iota
	// Begin opens a transaction that is already committed.
	Begin
	// Row is an INSERT into an outbox table.
	Row
	// Described describes an outbox table. The server does so before its first row, and again when the
	// table or its publication may have changed.
	Described
	// Commit ends the transaction.
	Commit
)

func (k Kind) String() string {
	switch k {
	case Other:
		return "other"
	case Begin:
		return "begin"
	case Row:
		return "row"
	case Described:
		return "described"
	case Commit:
		return "commit"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// Message is one decoded pgoutput message.
type Message struct {
	Kind Kind
	// Event is the row of a Row, nil otherwise.
	Event *outbox.Event
	// Commit is the LSN of the commit record, in Begin and Commit.
	Commit outbox.LSN
	// End is the end of the commit record, in Commit: the LSN to confirm once
	// all rows are settled.
	End outbox.LSN
	// CommitTime and XID are the transaction's, in Begin and Commit.
	CommitTime time.Time
	XID        uint32
	// Altered: a Described is another one than an earlier message was.
	Altered bool
}

// Decoder reads the messages of one replication session in their order. It is
// not safe for concurrent use.
type Decoder struct {
	tables []*outbox.Table
	byOID  map[uint32]*outbox.Table // nil where tables are told by their names
	// relations holds what the server has described, by relation id; nil is a
	// relation that is not ours, of which nothing else is kept. The walsender
	// keeps a larger entry for each of them.
	relations map[uint32]*relation
	// described is the newest description of each of our tables.
	described map[*outbox.Table]string
	// last saves the look-up for the rows that follow each other.
	last   *relation
	lastID uint32

	open  bool
	event outbox.Event
	// cursor is in the message that is being read.
	cursor cursor
}

// New returns a decoder that sees the given tables and no others. byOID tells them by the OIDs of the tables
// and their partitions: the WAL names a table as it was called when the row was written. Without it they are
// told by their names.
func New(tables []*outbox.Table, byOID map[uint32]*outbox.Table) *Decoder {
	return &Decoder{
		tables:    tables,
		byOID:     byOID,
		relations: make(map[uint32]*relation),
		described: make(map[*outbox.Table]string),
	}
}

// Decode reads one message. The event in it aliases data and the decoder: it is
// valid until the next call and for as long as data is left alone. After an
// error the session has to end; the next one needs a new decoder.
func (d *Decoder) Decode(data []byte) (Message, error) {
	if len(data) == 0 {
		return Message{}, errors.New("decode message: no bytes")
	}
	if data[0] == 'I' { // almost every message of a lagging slot
		ours, err := d.insert(data[1:])
		switch {
		case err != nil:
			return Message{}, fmt.Errorf("decode INSERT: %w", err)
		case ours:
			return Message{Kind: Row, Event: &d.event}, nil
		}
		return Message{}, nil
	}
	name, read := reader(data[0])
	if read == nil {
		return Message{}, refuse(data[0])
	}
	d.cursor = cursor{rest: data[1:]}
	m, err := read(d, &d.cursor)
	if err == nil {
		err = d.cursor.end()
	}
	if err != nil {
		return Message{}, fmt.Errorf("decode %s: %w", name, err)
	}
	return m, nil
}

// reader finds how a message of protocol 1 is called and read. A reader gives
// its verdict after the cursor's.
func reader(kind byte) (name string, read func(*Decoder, *cursor) (Message, error)) {
	switch kind {
	case 'B':
		return "BEGIN", (*Decoder).begin
	case 'C':
		return "COMMIT", (*Decoder).commit
	case 'R':
		return "RELATION", (*Decoder).relation
	case 'U':
		return "UPDATE", (*Decoder).update
	case 'D':
		return "DELETE", (*Decoder).delete
	case 'T':
		return "TRUNCATE", (*Decoder).truncate
	case 'O':
		return "ORIGIN", (*Decoder).origin
	case 'Y':
		return "TYPE", (*Decoder).typ
	case 'M':
		return "MESSAGE", (*Decoder).message
	}
	return "", nil
}
