package jetstream

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
)

// MaxHeader is the server's limit on a message's encoded headers, in bytes.
const MaxHeader = 65535

// tooSmall is a max_payload that leaves less than 64 KiB to a row's payload, where the
// headers are as large as they may be.
const tooSmall = 2 * MaxHeader

// Examine tells what the server lets the relay do with the stream, nil where there is
// none yet. It changes nothing: what it sends to find out JetStream has to refuse, and
// each question has a time limit of 5 s.
func (s *Stream) Examine(ctx context.Context, info *StreamInfo) (f check.Findings) {
	version, most := s.nc.ConnectedServerVersion(), s.nc.MaxPayload()
	f.Note("nats-server", "", "nats-server %s, max_payload %d bytes", version, most)
	if most < tooSmall {
		f.Warning("nats-max-payload", "raise max_payload of the server",
			"max_payload is %d bytes, and a message's headers may have %d: larger rows are parked",
			most, MaxHeader)
	}
	if inboxes := s.inboxes(); strings.HasPrefix(inboxes, nats.InboxPrefix) {
		f.Warning("nats-inbox", "leave nats.inbox_prefix empty, and let no other user publish on _WALPOST.>",
			"acknowledgements come back on %s, where consumers often may publish, too: "+
				"who does can have rows marked whose messages are not stored", inboxes)
	}
	if !s.serverIs(2, 14, 0) && s.cfg.Batching == BatchAuto && !s.cfg.Shared {
		f.Note("nats-no-fast-batches", "upgrade nats-server to 2.14 or newer",
			"nats-server %s takes no fast batches", version)
	}
	denied, err := s.deniedRequests(ctx, info)
	f.Failed(check.Error, "nats-unreachable", err)
	if list := strings.Join(denied, ", "); list != "" {
		f.Fault("nats-api-denied", "let the user publish on "+list,
			"the user may not publish on %s: nothing can be read back from the stream", list)
	}
	first := s.cfg.subjects()[0]
	subject := meet(first, first)
	if info != nil {
		subject = s.fenceSubject(info)
		f = append(f, s.consumersLeft(ctx, info)...)
	}
	if subject == "" {
		return f // the stream listens on none of them
	}
	may, err := s.mayPublish(ctx, s.refused(subject))
	f.Failed(check.Error, "nats-unreachable", err)
	if err == nil && !may {
		f.Warning("nats-publish-denied", fmt.Sprintf("let the user publish on %s", s.cfg.Pattern),
			"the user may not publish on %s: rows whose subjects are denied are parked, "+
				"and become dead letters", subject)
	}
	return f
}

// deniedRequests are the subjects of the API that a session needs and that the server
// denies. None of the requests does anything: they name another stream, no message, or
// a consumer that does not exist.
func (s *Stream) deniedRequests(ctx context.Context, info *StreamInfo) (denied []string, err error) {
	if info == nil {
		return nil, nil
	}
	const nobody = "walpost-doctor"
	for _, request := range []struct{ subject, body string }{
		{"STREAM.MSG.GET." + s.cfg.Name, `{"seq":0}`},
		{"CONSUMER.CREATE." + s.cfg.Name + "." + nobody, `{"stream_name":"","config":{}}`},
		{"CONSUMER.MSG.NEXT." + s.cfg.Name + "." + nobody, `{"batch":1,"no_wait":true}`},
		{"CONSUMER.DELETE." + s.cfg.Name + "." + nobody, ``},
	} {
		subject := s.APISubject(request.subject)
		may, err := s.mayPublish(ctx,
			&nats.Msg{Subject: subject, Reply: s.nc.NewInbox(), Data: []byte(request.body)})
		if err != nil {
			return nil, err
		}
		if !may {
			denied = append(denied, subject)
		}
	}
	return denied, nil
}

// mayPublish sends a message and reports whether the server lets it pass. On one
// connection the refusal comes before the answer to a ping that follows.
func (s *Stream) mayPublish(ctx context.Context, m *nats.Msg) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	err := s.nc.PublishMsg(m)
	if err == nil {
		err = s.nc.FlushWithContext(ctx)
	}
	if err != nil {
		return false, fmt.Errorf("ask for the permission to publish on %s: %w", m.Subject, err)
	}
	denied, publishing, ok := PermissionSubject(s.nc.LastError())
	return !ok || !publishing || denied != m.Subject, nil
}

// refused is a message that JetStream refuses for its expectation, and never stores.
func (s *Stream) refused(subject string) *nats.Msg {
	return &nats.Msg{Subject: subject, Header: nats.Header{
		nats.ExpectedStreamHdr:  {s.cfg.Name},
		nats.ExpectedLastSeqHdr: {strconv.FormatInt(math.MaxInt64, 10)},
	}}
}

// MayCreate reports what would keep [Stream.Create] from creating the stream, as far
// as it can be known before. It changes nothing.
func (s *Stream) MayCreate(ctx context.Context) error {
	if err := s.creatable(); err != nil {
		return err
	}
	subject := s.APISubject("STREAM.CREATE." + s.cfg.Name)
	// A stream without the name that the subject has is refused before anything is done.
	unnamed := &nats.Msg{Subject: subject, Reply: s.nc.NewInbox(), Data: []byte(`{"name":""}`)}
	may, err := s.mayPublish(ctx, unnamed)
	if err != nil {
		return err
	}
	if !may {
		fix := "let the user publish on " + subject + ", or create the stream yourself"
		return hint.Coded("stream-create-denied", hint.Errorf(fix,
			"create stream %s: the user may not publish on %s", s.cfg.Name, subject))
	}
	if err := s.subjectsFree(ctx); err != nil {
		return err
	}
	return s.accountTakesOne(ctx)
}

// accountTakesOne reports an account that has as many streams as it may have, where the
// user may ask for it.
func (s *Stream) accountTakesOne(ctx context.Context) error {
	account, err := s.account(ctx)
	if err != nil || account == nil {
		return err
	}
	if most := account.Limits.MaxStreams; most > 0 && account.Streams >= most {
		return hint.Coded("stream-account-full", hint.Errorf(apiHint(errStreamsMaximum),
			"create stream %s: the account has %d of %d streams", s.cfg.Name, account.Streams, most))
	}
	return nil
}

// consumersLeft reports a stream that has as many consumers as the account lets it have.
func (s *Stream) consumersLeft(ctx context.Context, info *StreamInfo) (f check.Findings) {
	account, err := s.account(ctx)
	f.Failed(check.Warn, "nats-unreachable", err)
	if err != nil || account == nil {
		return f
	}
	most := account.Limits.MaxConsumers
	if tier, ok := account.Tiers[fmt.Sprintf("R%d", max(1, info.Config.Replicas))]; ok {
		most = tier.Limits.MaxConsumers
	}
	own := info.Config.MaxConsumers
	if most > 0 && info.Consumers >= most && (own <= 0 || info.Consumers < own) {
		f.Warning("nats-max-consumers", "raise max_consumers of the account, or nats consumer rm "+s.cfg.Name,
			"the stream has %d consumers, and the account allows %d: "+
				"a start reads messages one by one, verify and tail fail", info.Consumers, most)
	}
	return f
}

// account is what the server says of the account, nil where the user may not ask for it.
func (s *Stream) account(ctx context.Context) (*jetstream.AccountInfo, error) {
	may, err := s.mayPublish(ctx, &nats.Msg{Subject: s.APISubject("INFO"), Reply: s.nc.NewInbox()})
	if err != nil || !may {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	account, err := s.js.AccountInfo(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask for the account's limits: %w", err)
	}
	return account, nil
}

// subjectsFree reports another stream that listens on the subjects.
func (s *Stream) subjectsFree(ctx context.Context) error {
	name, err := s.SubjectsTakenBy(ctx)
	if err != nil || name == "" {
		return err
	}
	return hint.Coded("stream-subjects-taken", hint.Errorf(apiHint(errSubjectsTaken),
		"create stream %s: stream %s listens on %s or some of it", s.cfg.Name, name, s.cfg.Pattern))
}

// SubjectsTakenBy is a stream that listens on the relay's subjects or some of them. It is "" where there is
// none, and where the user may not ask for it.
func (s *Stream) SubjectsTakenBy(ctx context.Context) (name string, err error) {
	names := s.APISubject("STREAM.NAMES")
	may, err := s.mayPublish(ctx, &nats.Msg{Subject: names, Reply: s.nc.NewInbox(), Data: []byte(`{}`)})
	if err != nil || !may {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	name, err = s.js.StreamNameBySubject(ctx, s.cfg.Pattern)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("look for other streams on %s: %w", s.cfg.Pattern, err)
	}
	return name, nil
}
