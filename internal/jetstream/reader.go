package jetstream

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
)

// ErrMessageGone means that the stream has no message at a sequence.
var ErrMessageGone = errors.New("message is gone")

// gotMessage is what STREAM.MSG.GET says of a message.
type gotMessage struct {
	Subject string    `json:"subject"`
	Seq     uint64    `json:"seq"`
	Header  []byte    `json:"hdrs"`
	Data    []byte    `json:"data"`
	Time    time.Time `json:"time"`
}

// headers are the message's.
func (m *gotMessage) headers() (nats.Header, error) {
	if len(m.Header) == 0 {
		return nats.Header{}, nil
	}
	return nats.DecodeHeadersMsg(m.Header)
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
		Error   *jetstream.APIError `json:"error"`
		Message gotMessage          `json:"message"`
	}
	if err := json.Unmarshal(msg.Data, &reply); err != nil {
		return gotMessage{}, err
	}
	switch e := reply.Error; {
	case e == nil:
		return reply.Message, nil
	case e.ErrorCode == jetstream.JSErrCodeMessageNotFound: // with the status 404, as a missing stream has
		return gotMessage{}, ErrMessageGone
	default:
		return gotMessage{}, e
	}
}

// eachHeaders is called with the subject and the headers of one message after the other.
type eachHeaders func(seq uint64, at time.Time, subject string, h nats.Header)

// headers reads the headers of the messages from one sequence to another, both
// included, in order; deleted ones are passed over. An empty filter is every
// subject.
//
// The consumer may live on a replica that lags: it then sees the end too early.
// So the leader is asked whether what was read last is the last there is.
//
// Where no consumer is allowed, refused is called, and the leader is asked for one message after the other.
// It is called with nil when a consumer has brought messages.
func (s *Stream) headers(
	ctx context.Context, from, to uint64, filter string, refused func(error), each eachHeaders,
) error {
	read, walks := s.consume, false
	for try := 1; ; try++ {
		last, err := read(ctx, from, to, filter, each)
		if last >= from {
			from, try = last+1, 1 // what was read stands
			if !walks && refused != nil {
				refused(nil)
			}
		}
		if from > to {
			return nil
		}
		if noConsumer(err) {
			if read, walks = s.walk, true; refused != nil {
				refused(err)
			}
			continue
		}
		switch pause := time.Duration(try) * 250 * time.Millisecond; {
		case err == nil:
			err = s.nothingBetween(ctx, from, to, filter)
		case ctx.Err() == nil && passing(err) && try <= 3 && s.awaitConnected(ctx, pause):
			continue
		}
		if err != nil {
			return fmt.Errorf("read stream %q back: %w", s.cfg.Name, err)
		}
		return nil
	}
}

// errSilent: a consumer that has messages delivers none, or leaves some out.
var errSilent = errors.New("the consumer does not deliver")

func silent(format string, args ...any) error {
	return hint.Errorf("let the relay publish on $JS.API.CONSUMER.MSG.NEXT.> "+
		"and look at the JetStream server that has the stream",
		"%w "+format, append([]any{errSilent}, args...)...)
}

// passing reports whether another consumer may do better: the one, the request to it, or
// the server it was asked at is gone.
func passing(err error) bool {
	for _, gone := range []error{
		errSilent, nats.ErrNoResponders, nats.ErrReconnectBufExceeded, nats.ErrDisconnected,
		context.DeadlineExceeded,
	} {
		if errors.Is(err, gone) {
			return true
		}
	}
	return false
}

// awaitConnected waits for a while, and then, for as long as a request may take, for a
// connection.
func (s *Stream) awaitConnected(ctx context.Context, while time.Duration) bool {
	for begun := time.Now(); ; {
		if !sleep.For(ctx, while) {
			return false
		}
		if s.nc.IsConnected() || time.Since(begun) > apiTimeout {
			return s.nc.IsConnected()
		}
	}
}

const (
	// fetchMost is how many messages are asked for at once, and fetchTimeout how long they
	// may take if they come without a pause of apiTimeout.
	fetchMost    = 500
	fetchTimeout = time.Minute
	// fetchHeartbeat is how often a consumer that has nothing to deliver says so; after
	// twice as long without a word it is given up. A server that restarts, and that the relay is not
	// connected to itself, may bring the consumer back and forget the request.
	fetchHeartbeat = time.Second
)

// consume returns the sequence up to which the consumer has delivered. Whatever it waits
// for has a time limit: the client's ordered consumer would ask for another consumer
// without end, and without a word, where there is none to be had.
func (s *Stream) consume(
	ctx context.Context, from, to uint64, filter string, each eachHeaders,
) (last uint64, err error) {
	consumer, done, err := s.consumer(ctx, jetstream.ConsumerConfig{
		DeliverPolicy: jetstream.DeliverByStartSequencePolicy, OptStartSeq: from,
		FilterSubject: filter, HeadersOnly: true,
	})
	if err != nil {
		return 0, err
	}
	defer done()
	pending, delivered := consumer.CachedInfo().NumPending, uint64(0)
	for pending > 0 && last < to {
		before := delivered
		most := min(fetchMost, pending, to-max(last, from-1))
		err := s.fetch(ctx, pull{consumer: consumer, most: most}, func(msg *nats.Msg) (more bool, err error) {
			meta, err := msg.Metadata()
			if err != nil {
				return false, err
			}
			if delivered++; meta.Sequence.Consumer != delivered {
				return false, silent("its message %d", delivered)
			}
			if meta.Sequence.Stream <= to {
				each(meta.Sequence.Stream, meta.Timestamp, msg.Subject, msg.Header)
			}
			last, pending = min(meta.Sequence.Stream, to), meta.NumPending
			return last < to, nil
		})
		if err != nil || delivered == before {
			// What was pending may have expired since, or have been purged: the leader knows.
			return last, err
		}
	}
	return last, nil
}

// noConsumer reports whether the stream or the account has as many consumers as it may.
func noConsumer(err error) bool {
	var api *jetstream.APIError
	return errors.As(err, &api) &&
		(api.ErrorCode == errConsumersMaximum || api.ErrorCode == errAccountResources)
}

// walk does what consume does without a consumer: it asks for one message after the other.
func (s *Stream) walk(
	ctx context.Context, from, to uint64, filter string, each eachHeaders,
) (last uint64, err error) {
	for from <= to {
		m, err := s.nextMessage(ctx, from, filter)
		if errors.Is(err, ErrMessageGone) {
			return to, nil
		} else if err != nil {
			return last, err
		}
		if m.Seq > to {
			return to, nil
		}
		h, err := m.headers()
		if err != nil {
			h = nats.Header{} // nobody's of the relay
		}
		h.Set(nats.MsgSize, strconv.Itoa(len(m.Data)))
		each(m.Seq, m.Time, m.Subject, h)
		last, from = m.Seq, m.Seq+1
	}
	return last, nil
}

// nextMessage reads the first message from a sequence on.
func (s *Stream) nextMessage(ctx context.Context, from uint64, filter string) (gotMessage, error) {
	if filter == "" {
		filter = ">"
	}
	return s.getMessage(ctx, fmt.Appendf(nil, `{"seq":%d,"next_by_subj":%q}`, from, filter))
}

// pull is one request to a consumer.
type pull struct {
	consumer jetstream.Consumer
	most     uint64
	// idle is how long a pause may be; 0 is apiTimeout.
	idle time.Duration
	// alive is called with every word from the server; it may be nil.
	alive func()
}

// fetch calls each with the consumer's next messages, fewer than asked for where no more
// come for a while, or where each wants no more. The client's own would take a message
// that has a header Status and no body, as anybody may publish one and as a consumer of
// headers has them all, for word from the server.
func (s *Stream) fetch(ctx context.Context, p pull, each func(*nats.Msg) (more bool, err error)) error {
	if !s.nc.IsConnected() {
		return nats.ErrDisconnected
	}
	n, pause, info := p.most, cmp.Or(p.idle, apiTimeout), p.consumer.CachedInfo()
	if most := info.Config.MaxRequestBatch; most > 0 {
		n = min(n, uint64(most))
	}
	messages := make(chan *nats.Msg, n+8) // and what the server says besides
	sub, err := s.nc.ChanSubscribe(s.nc.NewInbox(), messages)
	if err != nil {
		return err
	}
	defer func() { _ = sub.Unsubscribe() }()
	next := s.APISubject("CONSUMER.MSG.NEXT." + s.cfg.Name + "." + info.Name)
	request := fmt.Appendf(nil,
		`{"batch":%d,"expires":%d,"idle_heartbeat":%d}`, n, fetchTimeout, fetchHeartbeat)
	if err := s.nc.PublishRequest(next, sub.Subject, request); err != nil {
		return err
	}
	idle, silence := time.NewTimer(pause), time.NewTimer(2*fetchHeartbeat)
	defer idle.Stop()
	defer silence.Stop()
	for got := uint64(0); got < n; {
		select {
		case msg := <-messages:
			silence.Reset(2 * fetchHeartbeat)
			if p.alive != nil {
				p.alive()
			}
			if !strings.HasPrefix(msg.Reply, "$JS.ACK.") {
				if over, err := heard(msg); over || err != nil {
					return err
				}
				continue
			}
			idle.Reset(pause)
			got++
			if more, err := each(msg); err != nil || !more {
				return err
			}
		case <-silence.C:
			if len(messages) == 0 {
				return silent("its next %d messages", n-got)
			}
		case <-idle.C:
			if len(messages) == 0 {
				return nil
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// heard takes what the server says about a request: whether it is over.
func heard(msg *nats.Msg) (over bool, err error) {
	switch status := msg.Header.Get("Status"); status {
	case "100": // a heartbeat
		return false, nil
	case "404", "408": // there is nothing more, or there was no more in time
		return true, nil
	case "503":
		return true, nats.ErrNoResponders
	default:
		return true, silent("and says %s %s", status, msg.Header.Get("Description"))
	}
}

// consumer makes a consumer that vanishes by itself where done cannot delete it. The end of ctx does not
// break off a creation: the server would finish it, and no one would delete that consumer.
func (s *Stream) consumer(
	ctx context.Context, cfg jetstream.ConsumerConfig,
) (consumer jetstream.Consumer, done func(), err error) {
	cfg.AckPolicy, cfg.MemoryStorage, cfg.Replicas = jetstream.AckNonePolicy, true, 1
	cfg.InactiveThreshold = 30 * time.Second
	creating, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
	defer cancel()
	if consumer, err = s.js.CreateConsumer(creating, s.cfg.Name, cfg); err != nil {
		return nil, nil, fmt.Errorf("create consumer: %w", err)
	}
	return consumer, func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiTimeout)
		defer cancel()
		_ = s.js.DeleteConsumer(ctx, s.cfg.Name, consumer.CachedInfo().Name)
	}, nil
}

// nothingBetween fails where the stream's leader has a message from one sequence
// to another, both included.
func (s *Stream) nothingBetween(ctx context.Context, from, to uint64, filter string) error {
	reply, err := s.nextMessage(ctx, from, filter)
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
