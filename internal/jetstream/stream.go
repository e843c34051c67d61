package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
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
	Config  jetstream.StreamConfig
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
		Config:    info.Config,
	}
	if info.Cluster != nil && info.Cluster.Name != "" {
		out.Leader, out.Replicas = info.Cluster.Leader, info.Cluster.Replicas
	}
	return out, nil
}

// Create creates the stream: files, limits retention without a limit, and
// discard new, so that a limit set later becomes back-pressure and not a loss. Its
// duplicate window is short where nobody shares it.
// It fails where a stream of that name exists with another configuration. Call
// it at process start only, and only where no row is marked yet.
func (s *Stream) Create(ctx context.Context) error {
	if err := s.creatable(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*apiTimeout) // a replicated stream elects its leader first
	defer cancel()
	_, err := s.js.CreateStream(ctx, s.newConfig())
	if err != nil {
		return s.explain("create", "STREAM.CREATE", err)
	}
	return nil
}

// creatable reports an error where no server would create the stream.
func (s *Stream) creatable() error {
	if s.cfg.Pattern != ">" {
		return nil
	}
	return hint.Coded("stream-subject-all",
		hint.Errorf("begin nats.subject with a literal token, as in events.{event_type}, "+
			"or create the stream yourself",
			"create stream %s: its subject would be >, which JetStream refuses", s.cfg.Name))
}

// serverIs reports whether the server is of a version or a later one: it refuses
// fields that it does not know.
func (s *Stream) serverIs(major, minor, patch int) bool {
	var v [3]int
	_, _ = fmt.Sscanf(s.nc.ConnectedServerVersion(), "%d.%d.%d", &v[0], &v[1], &v[2])
	return slices.Compare(v[:], []int{major, minor, patch}) >= 0
}

// DuplicateWindow is that of a stream that is made for a relay alone. JetStream has every
// id of it in its memory, and those of its usual two minutes can be millions, and cost it
// a fifth of its rate. With batches it is the shortest that JetStream takes: the chain and
// the recovery scan keep duplicates away. Single messages that are under way together have it
// as a second net: under what an earlier session had under way, see Stream.Fence.
func DuplicateWindow(batches bool) time.Duration {
	if batches {
		return 100 * time.Millisecond
	}
	return 5 * time.Second
}

// sharedWindow is the duplicate window of a stream that others write to: there is nothing
// else against duplicates.
const sharedWindow = 2 * time.Minute

// description is that of a stream that a relay creates.
const description = "events of walpost"

// Unused reports whether a relay has created the stream and no message is in it yet.
func (i *StreamInfo) Unused() bool { return i.Config.Description == description && i.LastSeq == 0 }

// subjects are those that a stream of the relay listens on.
func (c *StreamConfig) subjects() []string {
	if c.Partitions == 0 {
		return []string{c.Pattern}
	}
	var all []string
	for p := range c.Partitions {
		all = append(all, strconv.Itoa(p)+strings.TrimPrefix(c.Pattern, "*"))
	}
	return all
}

func (s *Stream) newConfig() jetstream.StreamConfig {
	replicas := 1
	if s.nc.ConnectedClusterName() != "" {
		replicas = 3
	}
	auto := s.cfg.Batching == BatchAuto
	fast := (auto || s.cfg.Batching == BatchFast) && s.serverIs(2, 14, 0)
	atomic := s.cfg.Batching == BatchAtomic && s.serverIs(2, 12, 1)
	window := DuplicateWindow(fast || atomic)
	if s.cfg.Shared {
		window = sharedWindow
	}
	return jetstream.StreamConfig{
		AllowBatchPublish:  fast,
		AllowAtomicPublish: atomic,

		Name:        s.cfg.Name,
		Description: description,
		Subjects:    s.cfg.subjects(),
		Retention:   jetstream.LimitsPolicy,
		Storage:     jetstream.FileStorage,
		Discard:     jetstream.DiscardNew,
		Replicas:    replicas,
		Duplicates:  window,
		AllowDirect: true,
	}
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
			" and subscribe to its inbox prefix (nats.inbox_prefix, else _INBOX.>), "+
			"and check that the stream has a leader")
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
