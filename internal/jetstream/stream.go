package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
)

// apiTimeout bounds one request to the JetStream API.
const apiTimeout = 5 * time.Second

// ErrStreamNotFound: the account has no stream of that name.
var ErrStreamNotFound = errors.New("stream not found")

// StreamConfig says which stream the relay writes to and what it expects of it.
type StreamConfig struct {
	Name string
	// Domain is the JetStream domain; empty is the connected server's own.
	Domain string
	// Pattern is publish.Template.Pattern: what the relay publishes on. Partitions is that of the template:
	// JetStream takes no stream on *.events.>, so a stream of 2 partitions listens on 0.events.> and
	// 1.events.>.
	Pattern    string
	Partitions int
	// Shared allows other writers: no chain, duplicate window only.
	Shared bool
	// Batching is what the relay was asked to do; empty is BatchSingle.
	Batching Batching
	// AcceptWeak turns the refusal of a weak stream into a warning.
	AcceptWeak bool
}

// StreamInfo is the stream as its leader reports it.
type StreamInfo struct {
	// FirstSeq is LastSeq + 1 where the stream holds nothing.
	FirstSeq, LastSeq, Messages uint64
	// LastDeleted is the greatest sequence between them whose message was deleted, 0 without one; see
	// [Stream.FindDeleted].
	LastDeleted uint64
	// Bytes is what the messages take in the store.
	Bytes     uint64
	Consumers int
	// FirstTime and LastTime are when the first and the last message were stored, where
	// there is one.
	FirstTime, LastTime time.Time
	// Leader is the server that answered; empty outside a cluster.
	Leader string
	// Replicas are the others, as the leader sees them.
	Replicas []*jetstream.PeerInfo
	// Created tells a stream from another that took its name later.
	Created time.Time
	// At is when the leader answered, by its clock; zero where it does not say.
	At     time.Time
	Config jetstream.StreamConfig
}

// Stream asks the JetStream API about one stream. It changes nothing except by
// [Stream.Create], and it may be used by several goroutines.
type Stream struct {
	nc     *nats.Conn
	js     jetstream.JetStream
	cfg    StreamConfig
	asking asking // see Fence
}

// NewStream does no I/O.
func NewStream(nc *nats.Conn, cfg StreamConfig) (*Stream, error) {
	js, err := jetstream.New(nc)
	if cfg.Domain != "" {
		js, err = jetstream.NewWithDomain(nc, cfg.Domain)
	}
	if err != nil {
		return nil, hint.Errorf("check nats.domain", "use JetStream domain %q: %w", cfg.Domain, err)
	}
	return &Stream{nc: nc, js: js, cfg: cfg}, nil
}

// Name is the stream's name.
func (s *Stream) Name() string { return s.cfg.Name }

// Domain is the stream's, "" where it has none.
func (s *Stream) Domain() string { return s.cfg.Domain }

// APISubject is the subject of a JetStream API request, such as
// "STREAM.MSG.GET.EVENTS", in the stream's domain.
func (s *Stream) APISubject(request string) string {
	if s.cfg.Domain == "" {
		return "$JS.API." + request
	}
	return "$JS." + s.cfg.Domain + ".API." + request
}

// Info asks the stream's leader: no replica and no mirror answers STREAM.INFO.
// A leader that has been deposed may do so for some seconds more; the
// expected-sequence chain makes that harmless.
func (s *Stream) Info(ctx context.Context) (*StreamInfo, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	stream, err := s.js.Stream(ctx, s.cfg.Name)
	if errors.Is(err, nats.ErrReconnectBufExceeded) { // there is none
		err = nats.ErrDisconnected
	}
	if err != nil {
		return nil, s.explain("read", "STREAM.INFO", err)
	}
	info := stream.CachedInfo()
	out := &StreamInfo{
		FirstSeq:  info.State.FirstSeq,
		LastSeq:   info.State.LastSeq,
		Messages:  info.State.Msgs,
		Consumers: info.State.Consumers,
		Bytes:     info.State.Bytes,
		FirstTime: info.State.FirstTime,
		LastTime:  info.State.LastTime,
		Created:   info.Created,
		At:        info.TimeStamp,
		Config:    info.Config,
	}
	if info.Cluster != nil && info.Cluster.Name != "" {
		out.Leader, out.Replicas = info.Cluster.Leader, info.Cluster.Replicas
	}
	return out, nil
}

// FindDeleted sets LastDeleted. Where more than U messages were deleted, it takes the last one for deleted.
func (s *Stream) FindDeleted(ctx context.Context, info *StreamInfo) error {
	gone := info.LastSeq + 1 - info.FirstSeq - info.Messages
	if info.LastDeleted = 0; gone == 0 {
		return nil
	}
	if info.LastDeleted = info.LastSeq; gone > U {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	var now *jetstream.StreamInfo
	stream, err := s.js.Stream(ctx, s.cfg.Name)
	if err == nil {
		now, err = stream.Info(ctx, jetstream.WithDeletedDetails(true))
	}
	if err != nil {
		return s.explain("read", "STREAM.INFO", err)
	}
	if len(now.State.Deleted) > 0 {
		info.LastDeleted = slices.Max(now.State.Deleted)
	}
	return nil
}

// serverIs reports whether the server is of a version or a later one: it refuses
// fields that it does not know.
func (s *Stream) serverIs(major, minor, patch int) bool {
	var v [3]int
	_, _ = fmt.Sscanf(s.nc.ConnectedServerVersion(), "%d.%d.%d", &v[0], &v[1], &v[2])
	return slices.Compare(v[:], []int{major, minor, patch}) >= 0
}

// inboxes are the subjects on which the server's replies come back.
func (s *Stream) inboxes() string {
	return cmp.Or(s.nc.Opts.InboxPrefix, strings.TrimSuffix(nats.InboxPrefix, ".")) + ".>"
}

// explain names the request that failed and what helps.
func (s *Stream) explain(verb, request string, err error) error {
	subject := s.APISubject(request + "." + s.cfg.Name)
	late := errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errSilent)
	if denied := s.denial(subject); late && denied != nil {
		err = denied
	}
	if strings.HasPrefix(request, "CONSUMER.") {
		subject += ".>" // a consumer's name, which is another each time
	}
	wrapped := fmt.Errorf("%s stream %s: %w", verb, s.cfg.Name, err)
	var api *jetstream.APIError
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return hint.Errorf("check nats.stream and the account, or create it; "+
			"with nats.create_stream: true the first start of a relay does",
			"%s stream %s: %w", verb, s.cfg.Name, ErrStreamNotFound)
	case errors.Is(err, jetstream.ErrStreamNameAlreadyInUse):
		return hint.Wrap(wrapped, "the stream exists: walpost uses it as it is, and never changes it")
	case errors.Is(err, nats.ErrNoResponders):
		return hint.Wrap(hint.Coded("nats-no-jetstream", wrapped), "nobody answers "+subject+
			": enable JetStream on the server and for the account, or correct nats.domain")
	case late && request == "STREAM.CREATE":
		return hint.Wrap(wrapped,
			"no reply: let the user publish on "+subject+", or create the stream yourself")
	case late:
		return hint.Wrap(wrapped, "no reply: let the user publish on "+subject+
			" and subscribe to "+s.inboxes()+", and check that the stream has a leader")
	case errors.As(err, &api):
		if code := int(api.ErrorCode); code == 10039 || code == 10076 {
			wrapped = hint.Coded("nats-no-jetstream", wrapped)
		}
		return hint.Wrap(wrapped, apiHint(int(api.ErrorCode)))
	}
	return wrapped
}

// denial is the server's reason for not replying: the server reports a denial apart from the request, on the
// subject or one under it. It is nil where the last denial was of something else.
func (s *Stream) denial(subject string) error {
	err := s.nc.LastError()
	denied, publishing, ok := PermissionSubject(err)
	if ok && (!publishing || denied == subject || strings.HasPrefix(denied, subject+".")) {
		return err
	}
	return nil
}

// Error codes of the JetStream API.
const (
	errAccountResources = 10002
	errConsumersMaximum = 10026
	errStreamsMaximum   = 10027
	errSubjectsTaken    = 10065
)

func apiHint(code int) string {
	switch code {
	case 10039, 10076:
		return "enable JetStream on the server and for the account"
	case errSubjectsTaken:
		return "another stream listens on these subjects: name it in nats.stream, or change nats.subject"
	case 10005, 10074:
		return "the cluster cannot place three replicas now: " +
			"wait for its servers, or create the stream yourself"
	case 10113, errAccountResources, 10023, 10047, 10122, errStreamsMaximum:
		return "the account's JetStream limits are in the way: " +
			"raise them, or create the stream yourself with limits"
	}
	return ""
}
