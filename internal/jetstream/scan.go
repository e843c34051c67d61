package jetstream

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/outbox"
)

// U is how far, in messages, the publisher may run ahead of its oldest message whose
// row is not settled in its table. It is fixed, and part of the contract between
// one run of the relay and the next: a start that reads the last U messages of
// its own back has seen every row that could have been stored and not marked.
const U = 16384

// chunkSpan is how many sequences a scan backward reads at once. A chunk is read forward, and is in memory
// beside the step that it becomes part of. Each takes a consumer.
const chunkSpan = U / 4

// Message is a message of the relay's own that was read back.
type Message struct {
	Seq      uint64
	Stored   time.Time
	Size     int // of the body, in bytes
	Sum      Sum
	ID       outbox.MessageID
	Position outbox.Position // zero where the header is missing or unreadable
	// Polled: the row came from the table, or it had to wait, or was published again on purpose. The position
	// is that of the publisher then, and says nothing of the row.
	Polled bool
	// Row is where the WAL has the row; zero where only the table brought it.
	Row outbox.Position
	// Behind is the number of own messages between this one and the tail.
	Behind uint64
	// Aggregate is set where the headers say it and ScanOptions.Aggregates asked
	// for it.
	Aggregate outbox.AggregateKey
}

// ScanOptions say what is read back and who looks at it.
type ScanOptions struct {
	Source string
	// Phantom tells positions of WAL that the server never had. A message that the
	// WAL brought with one is counted, and is in no step; neither are messages of
	// another source. One that the poller sent is in its step, and never the tail.
	Phantom func(outbox.Position) bool
	// Passes is called with every own message of a scan backward, and leaves it out of the steps. It may be
	// the tail.
	Passes func(Message) bool
	// Step is called with every step of U own messages (the last one may be
	// shorter), and says whether to go on. Backwards, the newest message comes
	// first; forwards, the oldest.
	Step func([]Message) (more bool, err error)
	// May reports whether a row may have an id; nil is always. Messages with others are another writer's.
	May func(outbox.MessageID) bool
	// Aggregates has [Message.Aggregate] filled in.
	Aggregates bool
	// NoConsumer, if set, is told that the server allows no consumer more: messages are asked
	// for one by one. It is told nil when messages have come through a consumer.
	NoConsumer func(error)
}

// Found is what a recovery scan met.
type Found struct {
	// Tail is the newest own message that is not a phantom.
	Tail    Message
	HasTail bool
	// Beyond: the poller sent something after the tail, under positions that say
	// nothing here.
	Beyond bool
	Own    int
	// Phantoms are own messages of WAL that the server never had.
	Phantoms int
	// Foreign is the newest message of another writer among those that were read, 0
	// without one.
	Foreign uint64
	// Writer says whose message that is: see [WriterOf].
	Writer string
}

// mostStepBytes bounds the ids of a step: whoever may publish chooses them.
const mostStepBytes = 8 << 20

// ScanBackward reads the relay's own messages from the tail towards the first.
// lastSeq is to come from the stream's leader.
func (s *Stream) ScanBackward(ctx context.Context, firstSeq, lastSeq uint64, o ScanOptions) (Found, error) {
	var found Found
	all := uint64(0)
	if lastSeq >= firstSeq {
		all = lastSeq - firstSeq + 1
	}
	// They are reused, and made at once: together they are most of the memory that a start needs, and slices
	// that grow leave several times as much behind.
	chunk, step := make([]Message, 0, min(all, chunkSpan)), make([]Message, 0, min(all, U))
	bytes := 0 // of the step's ids
	for to, span := lastSeq, uint64(chunkSpan); to > 0 && to >= firstSeq; {
		from := max(firstSeq, 1)
		if to-from >= span {
			from = to - span + 1
		}
		var err error
		if chunk, err = s.readChunk(ctx, chunk[:0], o, from, to, &found); err != nil {
			return found, err
		}
		for _, m := range slices.Backward(chunk) {
			m.Behind = uint64(found.Own)
			switch {
			case found.HasTail:
			case o.phantom(m.Position):
				found.Beyond = true
			default:
				found.Tail, found.HasTail = m, true
			}
			found.Own++
			if o.Passes != nil && o.Passes(m) {
				continue
			}
			bytes += len(m.ID.ID)
			if step = append(step, m); len(step) < U && bytes < mostStepBytes {
				continue
			}
			if more, err := o.Step(step); err != nil || !more {
				return found, err
			}
			step, bytes = step[:0], 0
		}
		if to = from - 1; len(chunk) < chunkSpan/8 {
			span *= 2 // the own messages are few among others
		}
	}
	if len(step) == 0 {
		return found, nil
	}
	_, err := o.Step(step)
	return found, err
}

// ScanForward reads the relay's own messages from a sequence to lastSeq, towards the
// tail, in steps of at most U. Behind is not set.
func (s *Stream) ScanForward(ctx context.Context, from, lastSeq uint64, o ScanOptions) error {
	if from > lastSeq {
		return nil
	}
	chunk := make([]Message, 0, min(lastSeq-from+1, U))
	for ; from <= lastSeq; from += U {
		var found Found
		var err error
		if chunk, err = s.readChunk(ctx, chunk[:0], o, from, min(from+U-1, lastSeq), &found); err != nil {
			return err
		}
		if more, err := o.Step(chunk); err != nil || !more {
			return err
		}
	}
	return nil
}

// readChunk appends the own messages of a chunk, oldest first.
func (s *Stream) readChunk(
	ctx context.Context, chunk []Message, o ScanOptions, from, to uint64, found *Found,
) ([]Message, error) {
	filter := ""
	if s.cfg.Shared {
		filter = s.cfg.Pattern // a great deal may be none of the relay's business
	}
	var system, table string
	each := func(seq uint64, at time.Time, subject string, h nats.Header) {
		m := Message{Seq: seq, Stored: at}
		var own bool
		m.ID, own = outbox.ParseMessageID(o.Source, h.Get(nats.MsgIdHdr))
		if own = own && (o.May == nil || o.May(m.ID)); !own {
			if seq > found.Foreign {
				found.Foreign, found.Writer = seq, WriterOf(h)
			}
			return
		}
		// Copies: a header's values are pieces of one string with all of them.
		if m.ID.ID = strings.Clone(m.ID.ID); m.ID.Table != table {
			table = strings.Clone(m.ID.Table)
		}
		m.ID.Table = table // one for all
		if p, err := outbox.ParsePosition(h.Get(PositionHeader)); err == nil {
			if p.SystemID != system {
				system = strings.Clone(p.SystemID)
			}
			p.SystemID = system // one for all
			m.Position = p
		}
		m.Polled, m.Row = h.Get(ViaHeader) == ViaPoll || m.ID.Replay, m.Position
		if m.Polled {
			m.Row = rowIn(h, m.Position)
		}
		if o.Aggregates {
			m.Aggregate = aggregateIn(h)
		}
		if (!m.Polled || m.Row.SystemID != "") && o.phantom(m.Row) {
			found.Phantoms++
			return
		}
		if sizes := h[nats.MsgSize]; len(sizes) > 0 { // the server's own is the last
			m.Size, _ = strconv.Atoi(sizes[len(sizes)-1])
		}
		m.Sum = SumOf(subject, h)
		chunk = append(chunk, m)
	}
	err := s.headers(ctx, from, to, filter, o.NoConsumer, each)
	return chunk, err
}

// rowIn is where the WAL has the row of a message that repeats a position.
func rowIn(h nats.Header, at outbox.Position) outbox.Position {
	commit := h.Get(CommitHeader)
	if commit == "" {
		return outbox.Position{}
	}
	p, err := outbox.ParsePosition(fmt.Sprintf("%s/%d/%s/0/0", at.SystemID, at.Timeline, commit))
	if err != nil {
		return outbox.Position{}
	}
	return p
}

// aggregateIn is the key of the aggregate that the attributes name.
func aggregateIn(h nats.Header) outbox.AggregateKey {
	attribute := func(name string) []byte {
		if values := h["ce-"+name]; len(values) > 0 {
			return []byte(values[0])
		}
		return nil
	}
	return outbox.AggregateKeyOf(attribute("tenantid"), attribute("aggregatetype"), attribute("aggregateid"))
}

// SeqSince is the sequence of the first message that was stored at or after a
// time, and the next one to come where there is none.
func (s *Stream) SeqSince(ctx context.Context, at time.Time) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*apiTimeout)
	defer cancel()
	info, err := s.Info(ctx)
	if err != nil {
		return 0, err
	}
	since := at.Format(time.RFC3339)
	consumer, done, err := s.consumer(ctx, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartTimePolicy, OptStartTime: &at, HeadersOnly: true,
	})
	if err != nil {
		return 0, fmt.Errorf("find messages since %s: %w", since, s.explain("read", "CONSUMER.CREATE", err))
	}
	defer done()
	if consumer.CachedInfo().NumPending == 0 {
		if info.LastSeq >= info.FirstSeq && !info.LastTime.Before(at) {
			return 0, silent("what its leader has stored since %s: a replica lags", since)
		}
		return info.LastSeq + 1, nil
	}
	seq := uint64(0)
	err = s.fetch(ctx, pull{consumer: consumer, most: 1}, func(msg *nats.Msg) (more bool, err error) {
		meta, err := msg.Metadata()
		if err == nil {
			seq = meta.Sequence.Stream
		}
		return false, err
	})
	if err == nil && seq == 0 {
		err = silent("its first message")
	}
	if err != nil {
		return 0, fmt.Errorf("find messages since %s: %w", since, s.explain("read", "CONSUMER.MSG.NEXT", err))
	}
	return seq, nil
}

func (o *ScanOptions) phantom(p outbox.Position) bool { return o.Phantom != nil && o.Phantom(p) }
