package publish

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/outbox"
)

// PositionHeader carries an outbox.Position.
const PositionHeader = "Walpost-Position"

// Message is a message of the relay's own that was read back.
type Message struct {
	Seq      uint64
	Stored   time.Time
	ID       outbox.MessageID
	Position outbox.Position // zero where the header is missing or unreadable
	// Behind is the number of own messages between this one and the tail.
	Behind uint64
}

// ReadBackOptions say what is read back and who looks at it.
type ReadBackOptions struct {
	Source string
	// Phantom tells messages of WAL that the server never had. They are counted,
	// and are in no step. So are the messages of another source.
	Phantom func(outbox.Position) bool
	// Step is called with every step of U own messages (the last one may be
	// shorter), and says whether to go on. Backwards, the newest message comes
	// first; forwards, the oldest.
	Step func([]Message) (more bool, err error)
}

// Found is what a read-back met.
type Found struct {
	// Tail is the newest own message that is not a phantom.
	Tail    Message
	HasTail bool
	Own     int
	// Phantoms are own messages of WAL that the server never had.
	Phantoms int
	// ForeignTail: the stream's last message is another writer's.
	ForeignTail bool
}

// ReadBack reads the relay's own messages from the tail towards the first.
// lastSeq is to come from the stream's leader.
func (s *Stream) ReadBack(ctx context.Context, firstSeq, lastSeq uint64, o ReadBackOptions) (Found, error) {
	var found Found
	var chunk, step []Message // reused: together they are most of what a start needs
	for to, span := lastSeq, uint64(U); to > 0 && to >= firstSeq; {
		from := max(firstSeq, 1)
		if to-from >= span {
			from = to - span + 1
		}
		var err error
		if chunk, err = s.readChunk(ctx, chunk[:0], o, from, to, lastSeq, &found); err != nil {
			return found, err
		}
		for _, m := range slices.Backward(chunk) {
			m.Behind = uint64(found.Own)
			if !found.HasTail {
				found.Tail, found.HasTail = m, true
			}
			found.Own++
			if step = append(step, m); len(step) < U {
				continue
			}
			if more, err := o.Step(step); err != nil || !more {
				return found, err
			}
			step = step[:0]
		}
		if to = from - 1; len(chunk) < U/8 {
			span *= 2 // the own messages are few among others
		}
	}
	if len(step) == 0 {
		return found, nil
	}
	_, err := o.Step(step)
	return found, err
}

// ReadOn reads the relay's own messages from a sequence to lastSeq, towards the
// tail, in steps of at most U. Behind is not set.
func (s *Stream) ReadOn(ctx context.Context, from, lastSeq uint64, o ReadBackOptions) error {
	var chunk []Message
	for ; from <= lastSeq; from += U {
		var found Found
		var err error
		if chunk, err = s.readChunk(ctx, chunk[:0], o, from, min(from+U-1, lastSeq), lastSeq, &found); err != nil {
			return err
		}
		if more, err := o.Step(chunk); err != nil || !more {
			return err
		}
	}
	return nil
}

// readChunk appends the own messages of a chunk, oldest first.
func (s *Stream) readChunk(ctx context.Context, chunk []Message, o ReadBackOptions, from, to, lastSeq uint64, found *Found) ([]Message, error) {
	filter := ""
	if s.cfg.Shared {
		filter = s.cfg.Pattern // a great deal may be none of the relay's business
	}
	err := s.headers(ctx, from, to, filter, func(seq uint64, at time.Time, h nats.Header) {
		m := Message{Seq: seq, Stored: at}
		var own bool
		// Copies: a header's values are pieces of one string with all of them.
		if m.ID, own = outbox.ParseMessageID(o.Source, strings.Clone(h.Get(nats.MsgIdHdr))); !own {
			found.ForeignTail = found.ForeignTail || seq == lastSeq
			return
		}
		if p, err := outbox.ParsePosition(strings.Clone(h.Get(PositionHeader))); err == nil {
			m.Position = p
		}
		if o.Phantom != nil && o.Phantom(m.Position) {
			found.Phantoms++
			return
		}
		chunk = append(chunk, m)
	})
	return chunk, err
}
