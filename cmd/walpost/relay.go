package main

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/relay"
)

// relayService is the relay as run sees it.
type relayService interface {
	// Run relays until ctx is done, drains and returns nil; an error is one that no restart of a session
	// mends.
	Run(ctx context.Context) error
	Health
}

// service shows a relay's status as JSON. A relay that runs is alive: whatever fails it retries, and a
// restart of the process would not do better.
type service struct{ *relay.Relay }

func (service) Live() error   { return nil }
func (s service) Status() any { return s.Relay.Status() }

// hooks are what a command adds to the relay. Each may be left out.
type hooks struct {
	check    func(*outbox.Event) error
	tracer   trace.Tracer
	onStored func(time.Duration)
	once     bool
}

// newRelay translates the configuration for the relay package. It does no I/O.
func newRelay(cfg *Config, log *zap.Logger, registry prometheus.Registerer, h hooks) (relayService, error) {
	config, err := relayConfig(cfg)
	if err != nil {
		return nil, err
	}
	config.Check, config.Tracer, config.OnStored = h.check, h.tracer, h.onStored
	config.Once = h.once
	r, err := relay.New(config, log, registry)
	if err != nil {
		return nil, &usageError{err} // New does no I/O: what it refuses is the configuration
	}
	return service{r}, nil
}

func relayConfig(cfg *Config) (relay.Config, error) {
	tables, err := cfg.Tables()
	return relay.Config{
		PostgresURL:   cfg.Postgres.URL,
		PostgresFiles: cfg.Postgres.files(),
		Slot:          cfg.Postgres.Slot,
		Publication:   cfg.Postgres.Publication,
		Outboxes:      tables,
		Own:           cfg.Postgres.own(tables),
		Source:        cfg.Source,
		NATS:          natsConn(cfg),
		Stream: jetstream.StreamConfig{
			Name:       cfg.NATS.Stream,
			Domain:     cfg.NATS.Domain,
			Shared:     cfg.NATS.Shared,
			AcceptWeak: cfg.NATS.AcceptWeakStream,
			Batching:   jetstream.Batching(cfg.Publish.Batch),
		},
		CreateStream:   cfg.NATS.CreateStream,
		Subject:        cfg.NATS.Subject,
		Format:         publish.Format(cfg.NATS.Format),
		Window:         cfg.Publish.Window,
		WindowBytes:    int(cfg.Publish.WindowBytes),
		Mode:           relay.Mode(cfg.Mode),
		Initial:        cfg.Postgres.Initial,
		MaxRetainedWAL: cfg.Postgres.MaxRetainedWAL,

		DelayThreshold:   cfg.Fallback.DelayThreshold,
		FallbackInterval: cfg.Fallback.Interval,
		FallbackBatch:    cfg.Fallback.Batch,
		Retry: table.Retry{
			Backoff: cfg.Fallback.Backoff, MaxAttempts: cfg.Fallback.MaxAttempts,
		},
		OnPoison:   fallback.OnPoison(cfg.Fallback.OnPoison),
		Retention:  relay.Retention(cfg.Retention),
		TraceRatio: cfg.OTLP.TraceRatio,
	}, err
}

func natsConn(cfg *Config) jetstream.ConnConfig {
	n := &cfg.NATS
	return jetstream.ConnConfig{
		URL: n.URL, Creds: n.Creds, NKey: n.NKey, User: n.User, PasswordFile: n.PasswordFile,
		TokenFile: n.TokenFile,
		TLS: jetstream.TLSConfig{
			CA: n.TLS.CA, Cert: n.TLS.Cert, Key: n.TLS.Key, First: n.TLS.HandshakeFirst,
		},
		InboxPrefix: cfg.inboxPrefix(),
	}
}

// openStream connects a command, under the name that the server shows, for the stream of the configuration.
func openStream(ctx context.Context, cfg *Config, name string) (
	s *jetstream.Stream, t *publish.Template, done func(), err error,
) {
	if t, err = publish.NewTemplate(cfg.NATS.Subject); err != nil {
		return nil, nil, nil, &usageError{err}
	}
	conn := natsConn(cfg)
	conn.Name = name
	nc, err := jetstream.Connect(ctx, conn)
	if err != nil {
		return nil, nil, nil, err
	}
	s, err = jetstream.NewStream(nc, jetstream.StreamConfig{
		Name: cfg.NATS.Stream, Domain: cfg.NATS.Domain, Shared: cfg.NATS.Shared,
		Pattern: t.Pattern(), Partitions: t.Partitions(),
	})
	if err != nil {
		nc.Close()
		return nil, nil, nil, err
	}
	return s, t, nc.Close, nil
}
