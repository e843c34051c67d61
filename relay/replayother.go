package relay

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// ReplayPrefix is what stands before the subjects of rows that are published again into another stream. The
// stream has one subject, and that is `<prefix>.>`.
func ReplayPrefix(own string, info *jetstream.StreamInfo) (string, error) {
	name := info.Config.Name
	if name == own {
		return "", hint.Errorf("leave --to-stream out", "stream %s is the relay's own", name)
	}
	if subjects := info.Config.Subjects; len(subjects) == 1 {
		prefix, ok := strings.CutSuffix(subjects[0], ".>")
		if ok && !strings.ContainsAny(prefix, "*>{}") {
			return prefix, nil
		}
	}
	return "", hint.Errorf(
		fmt.Sprintf("nats stream add %s --subjects '%s.>' --defaults", name, strings.ToLower(name)),
		"stream %s has the subjects %q: want one of the form prefix.>", name, info.Config.Subjects)
}

// openOtherSender opens a publisher for another stream. Its messages are not chained: their ids keep what an
// earlier publisher had in flight from being stored twice.
func openOtherSender(ctx context.Context, s *session, name string) (l replaySender, err error) {
	to, err := jetstream.NewStream(s.nc, jetstream.StreamConfig{Name: name, Domain: s.cfg.Stream.Domain})
	if err != nil {
		return l, err
	}
	info, err := to.Info(ctx)
	if err != nil {
		return l, err
	}
	prefix, err := ReplayPrefix(s.cfg.Stream.Name, info)
	if err != nil {
		return l, fmt.Errorf("%w: %w", errReplay, err)
	}
	subject := prefix + "." + s.cfg.Subject
	template, err := publish.NewTemplate(subject)
	if err != nil {
		return l, fmt.Errorf("%w: %w", errReplay, err)
	}
	envelope, err := publish.NewEnvelope(publish.EnvelopeConfig{
		Source: s.envelope.Source(), Stream: name, Format: s.cfg.Format,
	})
	if err != nil {
		return l, err
	}
	publisher, err := publish.NewPublisher(ctx, publish.PublisherConfig{
		Conn: s.nc, Stream: to, Subjects: publish.NewSubjects(template), Envelope: envelope,
		Base: info.LastSeq, Window: 2 * mostChunk, WindowBytes: s.cfg.WindowBytes,
		Position: outbox.Position{
			SystemID: s.recovered.tail.SystemID, Timeline: s.recovered.tail.Timeline,
			Commit: s.recovered.tail.Commit, N: s.recovered.tail.N, Passed: s.publisher.Passed(),
		},
		OnStored: func([]publish.Stored) {}, Held: s.db.Held,
	})
	if err != nil {
		return l, err
	}
	publisher.Adapt(info)
	s.other.Store(publisher)
	return replaySender{
		publisher: publisher, stream: to, like: s.otherLikenesses(subject, info),
		window: 2 * mostChunk, acks: newReplayAcks(), chunk: leastChunk,
		close: func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainOther)
			defer cancel()
			s.other.Store(nil)
			for _, x := range publisher.Drain(ctx) {
				s.keepReplayed(x)
			}
			publisher.Close()
		},
	}, nil
}

// drainOther is how long the end of a replay into another stream waits for PubAcks.
const drainOther = 2 * time.Second
