package consume

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// Event is a message of the stream. What its writer did not say is empty.
type Event struct {
	// Sequence is the message's in the stream. It is another one in a stream that was recreated.
	Sequence uint64
	StoredAt time.Time // by the stream
	Subject  string

	// ID and Source identify the event among all (ce-id, ce-source). Type is its event_type, and Time is when
	// it was written, in RFC 3339.
	ID, Source, Type, Time string
	// ReplayOf is the ID of the event that this one repeats, where `walpost replay` published it again.
	ReplayOf                             string
	TenantID, AggregateType, AggregateID string
	AggregateVersion, EventVersion       string
	// Trace is the traceparent. With Config.Tracer the handler's context has a span below it.
	Trace  string
	Header nats.Header
	// Payload is the event's data, in both of walpost's formats.
	Payload []byte

	// Attempt counts from 1. It is higher where the handler failed at the event before.
	Attempt int
	// Epoch is that of the partition's owner: of two processes that call an external service for the same
	// event, the later owner has the higher one.
	Epoch int64
}

// size is about what the event takes in memory, in bytes: anybody who may publish chooses the headers.
func (e *Event) size() int {
	n := 512 + len(e.Subject) + len(e.Payload)
	for name, values := range e.Header {
		n += 64 + len(name)
		for _, value := range values {
			n += 16 + len(value)
		}
	}
	return n
}

// Partition is which of n partitions the event belongs to.
func (e *Event) Partition(n int) int { return int(e.hash() % uint32(n)) }

func (e *Event) hash() uint32 {
	return outbox.PartitionHash(e.TenantID, e.AggregateType, e.AggregateID, e.ID)
}

// aggregate is empty where the event belongs to none.
func (e *Event) aggregate() string {
	return outbox.PartitionKey(e.TenantID, e.AggregateType, e.AggregateID)
}

// seenID is the UUID under which consumer_seen has the event. A message without an id is that of its place.
func (e *Event) seenID(consumer string) string {
	source, id := e.Source, e.ID
	if id == "" {
		source, id = "", e.Header.Get(nats.MsgIdHdr)
	}
	if id == "" {
		id = fmt.Sprintf("%d/%d", e.Sequence, e.StoredAt.UnixNano())
	}
	h := sha256.New()
	for _, part := range [...]string{consumer, source, id} {
		var length [8]byte
		binary.BigEndian.PutUint64(length[:], uint64(len(part)))
		h.Write(length[:])
		h.Write([]byte(part))
	}
	return fmt.Sprintf("%x", h.Sum(nil)[:16])
}

// anchor is what the consumer remembers of a message to recognize the stream by it.
type anchor struct {
	seq      uint64 // 0: there is none
	id       string // Nats-Msg-Id
	at       time.Time
	position string
}

// newAnchor keeps what PostgreSQL can store: anybody may publish a header that is not UTF-8.
func newAnchor(seq uint64, at time.Time, id, position string) anchor {
	return anchor{seq, storable(id), at, storable(position)}
}

func (e *Event) anchor() anchor {
	position := e.Header.Get(jetstream.PositionHeader)
	return newAnchor(e.Sequence, e.StoredAt, e.Header.Get(nats.MsgIdHdr), position)
}

func eventOf(m jetstream.Received) Event {
	return Event{
		Sequence: m.Seq, StoredAt: m.At, Subject: m.Subject,
		ID: m.ID, Source: m.Source, Type: m.Type, Time: m.Time, ReplayOf: m.ReplayOf,
		TenantID: m.TenantID, AggregateType: m.AggregateType, AggregateID: m.AggregateID,
		AggregateVersion: m.AggregateVersion, EventVersion: m.EventVersion,
		Trace: m.Trace, Header: m.Header, Payload: m.Payload, Attempt: 1,
	}
}
