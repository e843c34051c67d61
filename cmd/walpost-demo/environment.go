package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/relay"
)

const (
	database    = "shop"
	streamName  = "EVENTS"
	outboxTable = "public.outbox_messages"
	// startTimeout is for each step of the start, on a machine that is busy with
	// something else.
	startTimeout = time.Minute
)

// environment is what the demo runs on. What it has not got yet is nil.
type environment struct {
	pg   *testenv.Postgres
	nats *testenv.NATS
	url  string // of the shop's database
	nc   *nats.Conn
	js   natsjs.JetStream
	db   *pgx.Conn // the demo's own, for the counts

	stopRelay context.CancelFunc
	relayDone chan error
}

// startEnvironment starts everything up to the relay that streams, and says so
// step by step. Close what it returns, also beside an error.
func startEnvironment(ctx context.Context, s *screen, onStored func(time.Duration)) (*environment, error) {
	e := &environment{}
	for _, step := range []struct {
		name, doing string
		start       func(context.Context) (string, error)
	}{
		{"PostgreSQL", "creating a cluster", e.startPostgres},
		{"NATS", "starting", e.startNATS},
		{"tables", "migrating", e.migrate},
		{"relay", "starting", func(ctx context.Context) (string, error) {
			return e.startRelay(ctx, s.logger(), onStored)
		}},
	} {
		s.block([]string{s.label(step.name) + s.dim(step.doing+" ...")})
		ctx, cancel := context.WithTimeout(ctx, startTimeout)
		done, err := step.start(ctx)
		cancel()
		if err != nil {
			return e, err
		}
		s.println(s.label(step.name) + done)
	}
	return e, nil
}

func (e *environment) startPostgres(ctx context.Context) (_ string, err error) {
	if e.pg, err = testenv.StartPostgres(ctx, testenv.PGOptions{FSync: true}); err != nil {
		return "", err
	}
	if e.url, err = e.pg.CreateDB(ctx, database); err != nil {
		return "", err
	}
	if e.db, err = pgx.Connect(ctx, e.url); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s on 127.0.0.1:%d, fsync on", e.pg.Binaries().Version, e.pg.Port()), nil
}

func (e *environment) startNATS(ctx context.Context) (_ string, err error) {
	if e.nats, err = testenv.StartNATS(ctx, testenv.NATSOptions{}); err != nil {
		return "", err
	}
	// A connection of the demo's own: what it counts does not pass the relay.
	if e.nc, err = nats.Connect(e.nats.URL(), nats.Name("walpost-demo"), nats.MaxReconnects(-1)); err != nil {
		return "", fmt.Errorf("connect to NATS: %w", err)
	}
	if e.js, err = natsjs.New(e.nc); err != nil {
		return "", err
	}
	return fmt.Sprintf("%s with JetStream on 127.0.0.1:%d, in this process",
		server.VERSION, e.nats.Port()), nil
}

func tables() []*outbox.Table {
	return []*outbox.Table{{
		Schema: "public", Name: outbox.DefaultTable, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate,
	}}
}

func (e *environment) migrate(ctx context.Context) (string, error) {
	cfg, err := pgx.ParseConfig(e.url)
	if err != nil {
		return "", err
	}
	m := migrations.New(cfg, tables())
	defer m.Close() //nolint:errcheck // nothing is buffered
	done, err := m.Up(ctx, migrations.Latest)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%d migrations, as by `walpost migrate up`", len(done)), nil
}

// startRelay returns when the relay streams, so that what follows is delivered
// from the WAL.
func (e *environment) startRelay(
	ctx context.Context, log *zap.Logger, onStored func(time.Duration),
) (string, error) {
	cfg := relayConfig(e.url, e.nats.URL())
	cfg.OnStored = onStored
	r, err := relay.New(cfg, log, prometheus.NewRegistry())
	if err != nil {
		return "", err
	}
	running, stop := context.WithCancel(context.Background())
	e.stopRelay, e.relayDone = stop, make(chan error, 1)
	go func() { e.relayDone <- r.Run(running) }()
	for r.Status().State != "streaming" {
		select {
		case err := <-e.relayDone:
			e.relayDone <- nil // for stop
			return "", fmt.Errorf("start the relay: %w", err)
		case <-ctx.Done():
			return "", fmt.Errorf("wait for the relay to stream: %w (it is %s %s)",
				ctx.Err(), r.Status().State, r.Status().LastError)
		case <-time.After(5 * time.Millisecond):
		}
	}
	return fmt.Sprintf("streams %s from slot %s to stream %s",
		outbox.DefaultTable, cfg.Slot, cfg.Stream.Name), nil
}

// relayConfig has the defaults of `walpost run`.
func relayConfig(postgresURL, natsURL string) relay.Config {
	return relay.Config{
		PostgresURL: postgresURL, Slot: "walpost", Publication: "walpost", Outboxes: tables(),
		NATS:         jetstream.ConnConfig{URL: natsURL},
		Stream:       jetstream.StreamConfig{Name: streamName},
		CreateStream: true, Subject: "events.{event_type}", Format: publish.FormatBinary,
		Window: 4096, WindowBytes: 32 << 20, DelayThreshold: time.Second,
	}
}

// settled waits until the relay has settled every row that is due, or has made no
// progress for half a minute: then the count shows what is missing.
func (e *environment) settled(ctx context.Context) error {
	const pending = `SELECT count(*) FROM outbox_messages
		WHERE processed_at IS NULL AND last_error IS NULL AND available_at <= now()`
	least, since := -1, time.Now()
	for {
		var n int
		if err := e.db.QueryRow(ctx, pending).Scan(&n); err != nil {
			return fmt.Errorf("count pending rows: %w", err)
		}
		if n == 0 || n == least && time.Since(since) > 30*time.Second {
			return nil
		}
		if n != least {
			least, since = n, time.Now()
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// verdict reads the whole stream and compares it with the table.
func (e *environment) verdict(ctx context.Context) (verdict, error) {
	if err := e.settled(ctx); err != nil {
		return verdict{}, err
	}
	t, err := readStream(ctx, e.js)
	if err != nil {
		return verdict{}, err
	}
	return t.compare(readTable(ctx, e.db))
}

// workspace is the temporary directory.
func (e *environment) workspace() string { return filepath.Dir(filepath.Dir(e.pg.Dir())) }

// close stops everything in the order the data flows, and removes it.
func (e *environment) close() error {
	var err error
	if e.stopRelay != nil {
		e.stopRelay()
		err = <-e.relayDone
	}
	if e.db != nil {
		err = errors.Join(err, e.db.Close(context.Background()))
	}
	if e.nc != nil {
		e.nc.Close()
	}
	if e.nats != nil {
		err = errors.Join(err, e.nats.Close())
	}
	if e.pg != nil {
		err = errors.Join(err, e.pg.Close())
	}
	return errors.Join(err, testenv.Cleanup())
}
