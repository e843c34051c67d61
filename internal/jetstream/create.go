package jetstream

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
)

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

// AddCommand is the command of the nats CLI that makes the stream which [Stream.Create] would make.
func (s *Stream) AddCommand() string {
	c := s.newConfig()
	command := "nats stream add " + c.Name
	for _, subject := range c.Subjects {
		command += fmt.Sprintf(" --subjects='%s'", subject)
	}
	command += fmt.Sprintf(" --discard=new --dupe-window=%s", c.Duplicates)
	if c.AllowBatchPublish {
		command += " --allow-fast"
	}
	if c.AllowAtomicPublish {
		command += " --allow-batch"
	}
	if c.Replicas > 1 {
		command += fmt.Sprintf(" --replicas=%d", c.Replicas)
	}
	if s.cfg.Domain != "" {
		command += " --js-domain=" + s.cfg.Domain
	}
	return command + " --defaults"
}
