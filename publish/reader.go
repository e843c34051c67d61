package publish

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// ErrMessageGone means that the stream has no message at a sequence.
var ErrMessageGone = errors.New("message is gone")

// Header reads one message's header from the stream's leader. It returns
// ErrMessageGone where there is no such message.
func (s *Stream) Header(ctx context.Context, seq uint64) (nats.Header, error) {
	reply, err := s.getMessage(ctx, fmt.Appendf(nil, `{"seq":%d}`, seq))
	if err != nil {
		return nil, fmt.Errorf("read message %d: %w", seq, err)
	}
	raw, err := base64.StdEncoding.DecodeString(reply.Header)
	if err != nil {
		return nil, fmt.Errorf("read message %d: %w", seq, err)
	}
	if len(raw) == 0 {
		return nats.Header{}, nil
	}
	return nats.DecodeHeadersMsg(raw)
}

// gotMessage is what STREAM.MSG.GET says of a message, its body aside.
type gotMessage struct {
	Seq    uint64 `json:"seq"`
	Header string `json:"hdrs"` // base64
}

// getMessage asks the leader: no replica answers STREAM.MSG.GET.
func (s *Stream) getMessage(ctx context.Context, request []byte) (gotMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	msg, err := s.nc.RequestWithContext(ctx, s.APISubject("STREAM.MSG.GET."+s.cfg.Name), request)
	if err != nil {
		return gotMessage{}, err
	}
	var reply struct {
		Error   *struct{ Code int } `json:"error"`
		Message gotMessage          `json:"message"`
	}
	if err := json.Unmarshal(msg.Data, &reply); err != nil {
		return gotMessage{}, err
	}
	if reply.Error != nil && reply.Error.Code == 404 {
		return gotMessage{}, ErrMessageGone
	}
	if reply.Error != nil {
		return gotMessage{}, errors.New(excerpt(msg.Data))
	}
	return reply.Message, nil
}

// headers reads the headers of the messages from one sequence to another, both
// included, in order; deleted ones are passed over. An empty filter is every
// subject.
//
// The consumer may live on a replica that lags: it then sees the end too early.
// So the leader is asked whether what was read last is the last there is.
func (s *Stream) headers(ctx context.Context, from, to uint64, filter string, each func(seq uint64, at time.Time, h nats.Header)) error {
	last, err := s.consume(ctx, from, to, filter, each)
	for try := 0; errors.Is(err, jetstream.ErrConsumerNotFound) && try < 3; try++ {
		// It vanished with its server. What was read stands.
		from = max(last+1, from)
		last, err = s.consume(ctx, from, to, filter, each)
	}
	if err == nil && last < to {
		err = s.nothingBetween(ctx, max(last+1, from), to, filter)
	}
	if err != nil {
		return fmt.Errorf("read stream %q back: %w", s.cfg.Name, err)
	}
	return nil
}

// consume returns the sequence up to which the consumer has delivered.
func (s *Stream) consume(ctx context.Context, from, to uint64, filter string, each func(uint64, time.Time, nats.Header)) (last uint64, err error) {
	cfg := jetstream.OrderedConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		HeadersOnly: true, InactiveThreshold: 30 * time.Second,
	}
	if filter != "" {
		cfg.FilterSubjects = []string{filter}
	}
	consumer, err := s.js.OrderedConsumer(ctx, s.cfg.Name, cfg)
	if err != nil {
		return 0, fmt.Errorf("create consumer: %w", err)
	}
	info := consumer.CachedInfo()
	defer func() { _ = s.js.DeleteConsumer(context.WithoutCancel(ctx), s.cfg.Name, info.Name) }()
	if info.NumPending == 0 {
		return 0, nil
	}
	messages, err := consumer.Messages(jetstream.PullMaxMessages(512))
	if err != nil {
		return 0, err
	}
	defer messages.Stop()
	for {
		msg, err := next(ctx, messages)
		if errors.Is(err, context.DeadlineExceeded) && ctx.Err() == nil {
			// What was pending may have expired since, or have been purged.
			info, err := consumer.Info(ctx)
			if err != nil || info.NumPending == 0 {
				return last, err
			}
			continue
		}
		if err != nil {
			return last, err
		}
		meta, err := msg.Metadata()
		if err != nil {
			return last, err
		}
		if meta.Sequence.Stream > to {
			return to, nil
		}
		last = meta.Sequence.Stream
		each(last, meta.Timestamp, msg.Headers())
		if last == to || meta.NumPending == 0 {
			return last, nil
		}
	}
}

// nothingBetween fails where the stream's leader has a message from one sequence
// to another, both included.
func (s *Stream) nothingBetween(ctx context.Context, from, to uint64, filter string) error {
	if filter == "" {
		filter = ">"
	}
	request := fmt.Appendf(nil, `{"seq":%d,"next_by_subj":%q}`, from, filter)
	reply, err := s.getMessage(ctx, request)
	switch {
	case errors.Is(err, ErrMessageGone):
		return nil
	case err != nil:
		return err
	case reply.Seq <= to:
		return fmt.Errorf("a replica that lags behind the leader answered: message %d is missing", reply.Seq)
	}
	return nil
}

// next waits for a message for as long as an API request may take.
func next(ctx context.Context, messages jetstream.MessagesContext) (jetstream.Msg, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	return messages.Next(jetstream.NextContext(ctx))
}
