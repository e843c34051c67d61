package publish

import (
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// Delivery is a message that the publisher has sent.
type Delivery struct {
	Ref       outbox.Ref
	XID       uint32
	EventType string
	// Key is the row's value of its table's partition key, if the table has one.
	Key string
	// Tag is what the sender gave along.
	Tag any
	// Trace is what PublisherConfig.Trace has returned.
	Trace Trace
	// Bytes is the message's size.
	Bytes int
	// Replay is the number of the request where the row was published again on purpose, else 0.
	Replay int64
	// Index is the message's place in the publisher.
	Index uint64
}

type state uint8

const (
	sent     state = iota // no reply yet
	stored                // its own PubAck came
	refused               // its own reply refuses the row
	doubted               // JetStream calls it a duplicate: to be looked at
	released              // the publisher is done with it
)

// entry is what the ring has of a message. It is reused, so it holds no memory of a row but
// its Ref; subjects and event types are shared.
type entry struct {
	delivery Delivery
	subject  string
	commit   int64  // in microseconds of Unix time; 0 where it is not known
	sentAt   uint32 // by the publisher's clock
	state    state
	ack      uint64 // sequence in the PubAck
	failure  *outbox.RowError
}

// ring has the messages from the oldest that is not released (index tail) to the newest
// (head-1), at most U. Later ones may be released, too. Its memory is fixed.
type ring struct {
	entries    [jetstream.U]entry
	tail, head uint64
	settled    uint64 // the greatest sequence below tail
	low        uint64 // every message below it has had its reply
	inflight   int
	bytes      int
}

func (r *ring) at(i uint64) *entry { return &r.entries[i%jetstream.U] }

func (r *ring) holds(i uint64) bool { return i >= r.tail && i < r.head }

func (r *ring) push(s entry) {
	s.delivery.Index = r.head
	*r.at(r.head) = s
	r.head++
	r.inflight++
	r.bytes += s.delivery.Bytes
}

// replied notes the reply of message i.
func (r *ring) replied(s *entry, to state) {
	s.state = to
	r.inflight--
	r.bytes -= s.delivery.Bytes
	for r.low < r.head && r.at(r.low).state != sent {
		r.low++
	}
}

// release forgets message i.
func (r *ring) release(i uint64) {
	if !r.holds(i) {
		return
	}
	s := r.at(i)
	s.state, s.delivery = released, Delivery{}
	for r.tail < r.head && r.at(r.tail).state == released {
		r.settled = max(r.settled, r.at(r.tail).ack)
		r.tail++
	}
}
