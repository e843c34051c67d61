package audit

import (
	"context"
	"fmt"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// Reader reads a stream from its first message on, in several goes.
type Reader struct {
	JetStream jetstream.JetStream
	Stream    string
	// Source is the relay's: it tells its messages from those of others.
	Source string

	next uint64 // the sequence to go on with; 0 is the first
}

// Read hands over what the stream holds now and was not read yet. After an error
// it can be called again; nothing is handed over twice.
func (r *Reader) Read(ctx context.Context, each func(Message)) error {
	s, err := r.JetStream.Stream(ctx, r.Stream)
	if err != nil {
		return fmt.Errorf("read stream %s: %w", r.Stream, err)
	}
	state := s.CachedInfo().State
	r.next = max(r.next, state.FirstSeq)
	if state.Msgs == 0 || r.next > state.LastSeq {
		return nil
	}
	if err := r.upTo(ctx, state.LastSeq, each); err != nil {
		return fmt.Errorf("read stream %s: %w", r.Stream, err)
	}
	return nil
}

func (r *Reader) upTo(ctx context.Context, last uint64, each func(Message)) error {
	consumer, err := r.JetStream.OrderedConsumer(ctx, r.Stream, jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: r.next,
	})
	if err != nil {
		return err
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(2048))
	if err != nil {
		return err
	}
	defer messages.Stop()
	for r.next <= last {
		msg, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return err
		}
		seq := meta.Sequence.Stream
		if seq > last {
			break // the last ones were deleted
		}
		each(r.message(seq, msg))
		r.next = seq + 1
		if meta.NumPending == 0 {
			break
		}
	}
	r.next = last + 1
	return nil
}

func (r *Reader) message(seq uint64, msg jetstream.Msg) Message {
	h := msg.Headers()
	m := Message{
		Seq: seq, RawID: h.Get(nats.MsgIdHdr), Body: string(msg.Data()),
		Polled: h.Get(publish.ViaHeader) == "poll",
	}
	m.ID, m.Own = outbox.ParseMessageID(r.Source, m.RawID)
	// A position that cannot be read is the zero one, which lies before all others.
	m.Position, _ = outbox.ParsePosition(h.Get(publish.PositionHeader))
	return m
}
