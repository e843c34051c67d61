package bench

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
)

const (
	// Database, Stream and Slot are the names of what a benchmark creates.
	Database = "walpost_bench"
	Stream   = "WALPOST_BENCH"
	Slot     = "walpost_bench"
	event    = "bench.happened"
)

// Config says what is measured.
type Config struct {
	// PostgresURL names a server on which the role may create a database: a URL, or keywords and values.
	PostgresURL   string
	PostgresFiles pg.Files   // the password, where the URL has none
	NATS          *nats.Conn // to the server that has the streams
	Domain        string     // its JetStream domain, or ""
	Replicas      int        // of each stream
	// Rows is the number of rows of a drain, PerTx that of each transaction, Payload the bytes of each
	// payload.
	Rows, PerTx, Payload int
	// The relay is measured with each of Marks (delete, update, journal) and each of Batches (single,
	// fast, atomic).
	Marks, Batches []string
	// Shards are numbers of relays that share the rows; 1 is one relay for all.
	Shards []int
	// Runs is how often each drain is repeated.
	Runs int
	// CostRows is the number of rows for which it is measured what an event costs the database, with each of
	// Marks; 0 measures nothing.
	CostRows int
	// Retained is the number of rows over which it is measured how large the outbox is, with each of Marks,
	// while retention takes delivered rows away; 0 measures nothing.
	Retained int
	// Binary: pg_recvlogical is measured with binary tuples, too.
	Binary bool
	// DuplicateWindow is the streams' duplicate window for a kind of batches.
	DuplicateWindow func(batch string) time.Duration
	// Producers is the number of sessions that commit rows as fast as they can, while it is measured what the
	// relay costs them, with each of Marks; 0 measures nothing.
	Producers int
	// Rates are the commits a second at which latency is measured with each of Marks, and For how long each
	// is held.
	Rates []int
	For   time.Duration
	// Migrate creates the tables in a database.
	Migrate func(ctx context.Context, url string) error
	// Fit is the statements that make the database fit a relay: they create its publication.
	Fit func(Setting) ([]string, error)
	// Retain makes a pass of retention: delivered rows go so long after they were processed.
	Retain func(ctx context.Context, s Setting, after time.Duration) error
	// Command is `walpost run` with a setting, as a process.
	Command func(Setting) (*exec.Cmd, error)
	// Relay runs a relay in this process. It calls onStored at each PubAck with the time since the commit.
	Relay func(ctx context.Context, s Setting, onStored func(time.Duration)) error
	// Publish stores n messages with walpost's publisher in this process, as if they were rows with that
	// event type and payload, perTx in each transaction. It returns when all have their PubAck.
	Publish func(ctx context.Context, s Setting, eventType, payload string, n, perTx int) error
	// Say is told what is being measured.
	Say func(format string, args ...any)
}

// Run measures. It removes what it created in the servers, also after an error.
func Run(ctx context.Context, cfg Config) (r *Report, err error) {
	b := &bench{Config: cfg}
	if b.js, err = b.jetStream(); err != nil {
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
	for run := range cfg.Runs {
		if err := b.drains(ctx, run); err != nil {
			return b.report, err
		}
	}
	if cfg.CostRows > 0 {
		if err := b.costs(ctx); err != nil {
			return b.report, err
		}
	}
	for _, rate := range cfg.Rates {
		for _, mark := range cfg.Marks {
			if err := b.latency(ctx, mark, rate); err != nil {
				return b.report, err
			}
		}
	}
	if cfg.Producers > 0 {
		if err := b.producers(ctx); err != nil {
			return b.report, err
		}
	}
	if cfg.Retained > 0 { // the last one: it leaves other partitions than there were
		if err := b.retained(ctx); err != nil {
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
	// The process ids of the servers, whose CPU time is counted; 0 where they are not on this machine.
	postgres, broker int
}

func (b *bench) jetStream(options ...jetstream.JetStreamOpt) (jetstream.JetStream, error) {
	if b.Domain != "" {
		return jetstream.NewWithDomain(b.NATS, b.Domain, options...)
	}
	return jetstream.New(b.NATS, options...)
}

func (b *bench) createDatabase(ctx context.Context) error {
	conn, err := pg.Connect(ctx, pg.Config{URL: b.PostgresURL, Files: b.PostgresFiles})
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+Database); err != nil {
		return hint.Errorf("let the role create databases (ALTER ROLE ... CREATEDB), "+
			"or drop the one that an earlier run has left: DROP DATABASE "+Database,
			"create a database for the benchmark: %w", err)
	}
	b.url, err = inDatabase(b.PostgresURL, Database)
	return err
}

// inDatabase is the connection string for another database.
func inDatabase(conn, database string) (string, error) {
	if !strings.Contains(conn, "://") {
		return strings.TrimSpace(conn + " dbname=" + database), nil // the last one counts
	}
	u, err := url.Parse(conn)
	if err != nil {
		return "", err
	}
	u.Path = "/" + database
	q := u.Query()
	q.Del("dbname")
	u.RawQuery = q.Encode()
	return u.String(), nil
}

// remove drops what the benchmark created.
func (b *bench) remove(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var errs []error
	errs = append(errs, b.deleteStreams(ctx))
	conn, err := pg.Connect(ctx, pg.Config{URL: b.PostgresURL, Files: b.PostgresFiles})
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	defer conn.Close(ctx)
	_, err = conn.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name)
		FROM pg_replication_slots WHERE database = $1 AND NOT active`, Database)
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
	b.postgres = listener(conn.PgConn().Conn().RemoteAddr().String())
	b.broker = listener(b.NATS.ConnectedAddr())
	return conn.QueryRow(ctx, "SHOW server_version").Scan(&b.report.PostgreSQL)
}

func (b *bench) connect(ctx context.Context) (*pgx.Conn, error) {
	return pg.Connect(ctx, pg.Config{URL: b.url, Files: b.PostgresFiles})
}

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

// unsynced spares the session a flush for each transaction.
const unsynced = `SET synchronous_commit = off`

// pad fills a payload up to its size, with text that PostgreSQL cannot compress.
func pad(payload int) string {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+-"
	random := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, max(payload-len(`{"n": 123456, "pad": ""}`), 0))
	for i := range b {
		b[i] = letters[random.IntN(len(letters))]
	}
	return string(b)
}

// fillSQL inserts rows, perTx in each transaction.
func fillSQL(set Setting, rows, perTx, payload int) string {
	return fmt.Sprintf(`DO $$
		BEGIN
			FOR i IN 1 .. %d BY %d LOOP
				INSERT INTO %s (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'bench', g %% 1000, '%s', jsonb_build_object('n', g, 'pad', '%s')
				FROM generate_series(i, least(i + %d - 1, %d)) g;
				COMMIT;
			END LOOP;
		END $$`, rows, perTx, set.table(), event, pad(payload), perTx, rows)
}

// drains measures the source, each drain, and the sinks once.
func (b *bench) drains(ctx context.Context, run int) error {
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
			b.report.note("the source was not measured: it takes a drain by one relay first (--shards 1,...)")
		default:
			if err := b.sources(ctx, run); err != nil {
				return err
			}
		}
		b.Say("%s", set)
		m, err := b.drain(ctx, set, b.Rows)
		if err != nil {
			return err
		}
		b.report.add(set.String(), m)
	}
	return b.sinks(ctx, all[len(all)-1], run)
}

// patience is how long a relay may make no progress.
const patience = time.Minute

// How many rows are not marked: some, at least.
const (
	unmarkedSQL = `SELECT count(*)::int FROM (
	SELECT FROM public.outbox_messages WHERE processed_at IS NULL LIMIT 1
) x`
	// The ids have no gaps.
	unjournaledSQL = `SELECT ((SELECT max(id) - min(id) + 1 FROM public.outbox_events)
	- (SELECT coalesce(sum(upper(r) - lower(r)), 0) FROM public.outbox_journal, unnest(ids) r))::int`
)

// unjoinedSQL counts the outboxes of running relays whose rows do not come from the slot yet.
const unjoinedSQL = `SELECT count(*)::int FROM public.outbox_sent
	WHERE noted_at IS NOT NULL AND ended_at IS NULL AND published_as IS NULL`

// settled waits for the marks.
func (b *bench) settled(ctx context.Context, mark string, ended func() error) error {
	if mark == "journal" {
		return b.none(ctx, unjournaledSQL, ended)
	}
	return b.none(ctx, unmarkedSQL, ended)
}

// none waits until a query counts nothing any more. It fails when the relay ends before.
func (b *bench) none(ctx context.Context, sql string, ended func() error) error {
	conn, err := b.connect(ctx)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	begun := time.Now()
	for left := 1; left > 0; {
		if err := ended(); err != nil {
			return fmt.Errorf("the relay has ended too early: %w", err)
		}
		if time.Since(begun) > patience {
			return fmt.Errorf("the relay has not settled every row after %s", patience)
		}
		if err := conn.QueryRow(ctx, sql).Scan(&left); err != nil {
			return err
		}
		if !sleep.For(ctx, 10*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	return nil
}

func median[T int64 | float64 | time.Duration](all []T) T {
	if len(all) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(all))
	return sorted[len(sorted)/2]
}
