// Package relay puts the parts together: the WAL (stream, decode) flows into
// JetStream (publish), and what was stored is settled in the table (internal/table)
// before PostgreSQL may forget it.
//
// Three loops lie inside each other. Run connects, checks and then repeats
// terms for ever. A term holds the advisory lock, which makes this relay the
// active one, and repeats sessions. A session is one START_REPLICATION and one
// publisher; whatever fails in it ends it, and the next one begins with the
// recovery scan of the stream. There is no other recovery.
package relay

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// Relay delivers the outboxes of one database. Use New, then Run once. It only puts its parts together: the
// reporter says what they do, the starter finds the servers, the leader has one session after the other. None
// of them knows Relay.
type Relay struct {
	*reporter
	*servers

	leader *leader
	// current is the session that runs, nil where none does: for the gauges, the status, and the errors of
	// the connection to NATS, which come from other goroutines.
	current atomic.Pointer[session]
}

// New checks the configuration. It does no I/O.
func New(cfg Config, log *zap.Logger, registry prometheus.Registerer) (*Relay, error) {
	r := &Relay{servers: &servers{cfg: &cfg}}
	r.cfg.setDefaults()
	tables := cfg.Outboxes
	cfg.Outboxes = make([]*outbox.Table, len(tables))
	for i, t := range tables {
		own := *t // each start writes into it what the catalog says
		cfg.Outboxes[i] = &own
	}
	var err error
	if r.template, err = publish.NewTemplate(cfg.Subject); err != nil {
		return nil, err
	}
	for _, t := range cfg.Outboxes {
		if !t.Mark.Valid() {
			return nil, hint.Errorf("set mark: update, delete or journal",
				"outbox %s: unknown mark %q", t, t.Mark)
		}
		if err := r.template.CheckLayout(t); err != nil {
			return nil, err
		}
		if cfg.Initial == "none" && !table.CanSkip(t) {
			return nil, hint.Errorf("delete the rows that shall not be published yourself, and leave "+
				"postgres.initial out",
				"postgres.initial: none marks rows instead of sending them, and says so in last_error: "+
					"outbox %s needs mark: update and such a column for that", t)
		}
		if !t.Shard.All() && cfg.Stream.Shared {
			return nil, hint.Errorf("give every shard a stream of its own, join them for consumers in a "+
				"stream with sources, and leave nats.shared out",
				"shard %s with nats.shared: the shards have one source, and take each other's messages for "+
					"their own", t.Shard)
		}
	}
	r.cfg.Stream.Pattern, r.cfg.Stream.Partitions = r.template.Pattern(), r.template.Partitions()
	r.reporter = newReporter(log, newMetrics(registry))
	if cfg.Once {
		r.once = &once{}
	}
	registerSessionGauges(registry, r.cfg, r.current.Load)
	r.leader = newLeader(r.reporter, r.servers, &r.current)
	return r, nil
}

// Run delivers until ctx is done, and then drains, confirms and returns nil. With Config.Once it ends by
// itself, and fails where ctx is done before that. An error means that somebody has to put something right
// before it can begin, or that the NATS connection was closed for good: every other failure is retried, with
// backoff, for ever, and so are servers that are away at the start.
func (r *Relay) Run(parent context.Context) error {
	ctx, giveUp := context.WithCancelCause(parent)
	defer giveUp(nil)
	if r.once != nil {
		r.once.end = giveUp
	}
	start := r.newStarter(giveUp)
	if err := start.begin(ctx); err != nil {
		if parent.Err() != nil {
			return r.once.interrupted()
		}
		return err
	}
	r.leader.past.created = start.created
	defer r.nc.Close()
	r.leader.run(ctx)
	r.metrics.standBy()
	r.status.set(stateStopped, nil)
	if errors.Is(context.Cause(ctx), errDelivered) {
		r.sayDelivered(parent)
		return r.stillAside()
	}
	r.log.Info("stopped")
	if parent.Err() == nil {
		return context.Cause(ctx)
	}
	return r.once.interrupted()
}

func (r *Relay) newStarter(giveUp func(error)) *starter {
	return &starter{reporter: r.reporter, servers: r.servers, giveUp: giveUp, deny: func(subject string) {
		if s := r.current.Load(); s != nil {
			s.publisher.Deny(subject)
			if other := s.other.Load(); other != nil {
				other.Deny(subject)
			}
		}
	}}
}

// DefaultSource is the source where the configuration names none: unique for ever,
// and usable in a header.
func DefaultSource(systemID, database string) string {
	return fmt.Sprintf("%s/%s", systemID, url.PathEscape(database))
}
