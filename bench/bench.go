package bench

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os/exec"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
)

const (
	// Database, Stream and Slot are what a benchmark works in.
	Database = "walpost_bench"
	Stream   = "WALPOST_BENCH"
	Slot     = "walpost_bench"
	event    = "bench.happened"
)

// Config says what is measured.
type Config struct {
	// PostgresURL is a server on which the role may create a database. NATS is
	// connected to the server.
	PostgresURL string
	NATS        *nats.Conn
	// Replicas is the stream's.
	Replicas int
	// Rows is how many rows are drained, PerTx of them in each transaction, each with
	// a payload of so many bytes.
	Rows, PerTx, Payload int
	// Marks and Batches are those that the relay drains with, each with each: none,
	// delete, update; single, fast, atomic.
	Marks, Batches []string
	// Shards are numbers of relays that share the rows, from 1 on.
	Shards []int
	// Runs is how often each drain is repeated.
	Runs int
	// Binary has the source's limit measured with binary tuples, too.
	Binary bool
	// DuplicateWindow is that of the streams for a kind of batches.
	DuplicateWindow func(batch string) time.Duration
	// Rates are the commits a second at which latency is measured, each for so long.
	Rates []int
	For   time.Duration
	// Migrate makes the tables in a database.
	Migrate func(ctx context.Context, url string) error
	// Publication is the statement that makes a relay's publication.
	Publication func(Setting) (string, error)
	// Command is `walpost run` with a setting as a process of its own, Relay the
	// same in this one, which calls onStored at each PubAck with the time since the
	// commit.
	Command func(Setting) (*exec.Cmd, error)
	Relay   func(ctx context.Context, s Setting, onStored func(time.Duration)) error
	// Say is told what is being measured.
	Say func(format string, args ...any)
}

// Run measures. What it has made in the servers it removes, also where it fails.
func Run(ctx context.Context, cfg Config) (r *Report, err error) {
	b := &bench{Config: cfg}
	if b.js, err = jetstream.New(cfg.NATS); err != nil {
		return nil, err
	}
	if err := b.createDatabase(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.remove(context.WithoutCancel(ctx))) }()
	if err := cfg.Migrate(ctx, b.url); err != nil {
		return nil, err
	}
	b.report = &Report{Rows: cfg.Rows, PerTx: cfg.PerTx, Payload: cfg.Payload, Replicas: cfg.Replicas}
	if err := b.identify(ctx); err != nil {
		return nil, err
	}
	for range cfg.Runs {
		if err := b.drains(ctx); err != nil {
			return b.report, err
		}
	}
	for _, rate := range cfg.Rates {
		if err := b.latency(ctx, rate); err != nil {
			return b.report, err
		}
	}
	return b.report, nil
}

type bench struct {
	Config
	url    string // of the database
	js     jetstream.JetStream
	report *Report
	// servers are the processes whose CPU time is counted, 0 where they are not on
	// this machine.
	postgres, broker int
}

func (b *bench) createDatabase(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, b.PostgresURL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+Database); err != nil {
		return hint.Errorf("let the role create databases (ALTER ROLE ... CREATEDB), or drop the one that an earlier run has left: DROP DATABASE "+Database,
			"create a database for the benchmark: %w", err)
	}
	u, err := url.Parse(b.PostgresURL)
	if err != nil {
		return err
	}
	u.Path = "/" + Database
	b.url = u.String()
	return nil
}

// remove drops what the benchmark has made.
func (b *bench) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var errs []error
	errs = append(errs, b.deleteStreams(ctx))
	conn, err := pgx.Connect(ctx, b.PostgresURL)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = $1 AND NOT active`, Database)
	errs = append(errs, err)
	_, err = conn.Exec(ctx, "DROP DATABASE IF EXISTS "+Database+" WITH (FORCE)")
	return errors.Join(append(errs, err)...)
}

func (b *bench) identify(ctx context.Context) error {
	conn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	b.report.NATS = b.NATS.ConnectedServerVersion()
	b.postgres, b.broker = listener(conn.PgConn().Conn().RemoteAddr().String()), listener(b.NATS.ConnectedAddr())
	return conn.QueryRow(ctx, "SHOW server_version").Scan(&b.report.PostgreSQL)
}

func (b *bench) connect(ctx context.Context) (*pgx.Conn, error) { return pgx.Connect(ctx, b.url) }

func (b *bench) exec(ctx context.Context, statements ...string) error {
	conn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for _, sql := range statements {
		if _, err := conn.PgConn().Exec(ctx, sql).ReadAll(); err != nil {
			return fmt.Errorf("%.60s: %w", sql, err)
		}
	}
	return nil
}

// unsynced does without a flush for each transaction of the session.
const unsynced = `SET synchronous_commit = off`

// fillSQL inserts rows, so many in each transaction.
func fillSQL(rows, perTx, payload int) string {
	return fmt.Sprintf(`DO $$
		BEGIN
			FOR i IN 1 .. %d BY %d LOOP
				INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'bench', g %% 1000, '%s', jsonb_build_object('n', g, 'pad', repeat('x', %d))
				FROM generate_series(i, least(i + %d - 1, %d)) g;
				COMMIT;
			END LOOP;
		END $$`, rows, perTx, event, max(payload-24, 0), perTx, rows)
}

// drains measures each limit and each drain once.
func (b *bench) drains(ctx context.Context) error {
	b.Say("filling %d rows, %d in each transaction, with %d bytes", b.Rows, b.PerTx, b.Payload)
	var all []Setting
	for _, of := range b.Shards {
		for _, batch := range b.Batches {
			for _, mark := range b.Marks {
				all = append(all, Setting{URL: b.url, Mark: mark, Batch: batch, Of: of})
			}
		}
	}
	for i, set := range all {
		if err := b.prepare(ctx, set, b.Rows); err != nil {
			return err
		}
		switch {
		case i > 0:
		case set.Of > 1:
			b.report.note("the source's limit was not measured: it takes a drain by one relay first (--shards 1,...)")
		default:
			if err := b.sources(ctx); err != nil {
				return err
			}
		}
		b.Say("%s", set)
		m, err := b.drain(ctx, set, b.Rows)
		if err != nil {
			return err
		}
		b.report.add(set.String(), m)
		if i == len(all)-1 {
			if err := b.sink(ctx, set.parts()[0].Stream()); err != nil {
				return err
			}
		}
	}
	return nil
}

// settled waits for the marks.
func (b *bench) settled(ctx context.Context, mark string) error {
	if mark == "none" {
		return nil
	}
	conn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	for left := 1; left > 0; {
		if err := conn.QueryRow(ctx, `SELECT count(*)::int FROM (SELECT FROM outbox_messages WHERE processed_at IS NULL LIMIT 1) x`).Scan(&left); err != nil {
			return err
		}
		if err := pause(ctx, 10*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func median[T int64 | float64 | time.Duration](all []T) T {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}
