package audit

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// Reader reads a stream from its first message on, in several goes.
type Reader struct {
	JetStream natsjs.JetStream
	Stream    string
	// Source is the relay's: it tells its messages from those of others.
	Source string
	// Skip, if set, tells messages that are not handed over.
	Skip func(nats.Header) bool
	// Replayed, if set, is given the messages that were published again on purpose. Read hands over the
	// others.
	Replayed func(Message)

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
	consumer, err := r.JetStream.OrderedConsumer(ctx, r.Stream, natsjs.OrderedConsumerConfig{
		DeliverPolicy: natsjs.DeliverByStartSequencePolicy, OptStartSeq: r.next,
	})
	if err != nil {
		return err
	}
	messages, err := consumer.Messages(natsjs.PullMaxMessages(2048))
	if err != nil {
		return err
	}
	defer messages.Stop()
	for r.next <= last {
		msg, err := messages.Next(natsjs.NextContext(ctx))
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
		switch m := r.message(seq, msg); {
		case r.Skip != nil && r.Skip(msg.Headers()):
		case !m.Own || !m.ID.Replay:
			each(m)
		case r.Replayed != nil:
			r.Replayed(m)
		}
		r.next = seq + 1
		if meta.NumPending == 0 {
			break
		}
	}
	if r.next <= last {
		if err := r.nothingUpTo(ctx, last); err != nil {
			return err
		}
	}
	r.next = last + 1
	return nil
}

// nothingUpTo asks the stream's leader whether there is a message between what was
// read and the last one: the consumer may live on a replica that lags.
func (r *Reader) nothingUpTo(ctx context.Context, last uint64) error {
	request := fmt.Appendf(nil, `{"seq":%d,"next_by_subj":">"}`, r.next)
	reply, err := r.JetStream.Conn().RequestWithContext(ctx, "$JS.API.STREAM.MSG.GET."+r.Stream, request)
	if err != nil {
		return err
	}
	var got struct {
		Error   *natsjs.APIError
		Message struct{ Seq uint64 }
	}
	if err := json.Unmarshal(reply.Data, &got); err != nil {
		return err
	}
	switch {
	case got.Error != nil && got.Error.ErrorCode == natsjs.JSErrCodeMessageNotFound:
		return nil
	case got.Error != nil:
		return got.Error
	case got.Message.Seq <= last:
		return fmt.Errorf("a replica that lags has answered: message %d was not read", got.Message.Seq)
	}
	return nil
}

func (r *Reader) message(seq uint64, msg natsjs.Msg) Message {
	h := msg.Headers()
	m := Message{
		Seq: seq, RawID: h.Get(nats.MsgIdHdr), Body: string(msg.Data()),
		Polled: h.Get(jetstream.ViaHeader) == "poll",
	}
	m.ID, m.Own = outbox.ParseMessageID(r.Source, m.RawID)
	// A position that cannot be read is the zero one, which lies before all others.
	m.Position, _ = outbox.ParsePosition(h.Get(jetstream.PositionHeader))
	return m
}
