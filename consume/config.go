package consume

import (
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel/trace"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
)

// Config configures a consumer. Name, NATS, Start and Pool or DB are required.
type Config struct {
	// Name identifies the consumer: all processes that run it share its positions and divide its partitions
	// among themselves. Another stream needs another name.
	Name string
	// Pool is the database of [Run], [RunBatch] and [RunExternal]. A partition that has events takes one of
	// its connections for each transaction; a pooler in transaction mode may be between.
	Pool *pgxpool.Pool
	// DB is the database of [RunSQL], through any driver for PostgreSQL.
	DB *sql.DB
	// Direct is the URL of the database for one connection that holds the partitions' locks. It must not lead
	// through a pooler in transaction mode, which is refused. Default: that of Pool. DB needs it.
	Direct string
	// Schema has walpost's tables. Default: public.
	Schema string

	// NATS is the application's connection.
	NATS *nats.Conn
	// Domain is the JetStream domain. Default: the server's.
	Domain string
	// Stream is the stream's name. Default: EVENTS.
	Stream string
	// Filters are the subjects that are read, with wildcards; no subject may fit two of them. A change counts
	// from the consumer's position on. What the stream's limits delete within a second may be reported as a
	// gap although it fits no filter. Default: every subject.
	Filters []string
	// Start is where a new consumer begins: "all" is the stream's first event, "new" is after its last one,
	// and a time (RFC 3339) is the first event that was stored at it or later. It has no meaning for a
	// consumer that exists.
	Start string

	// Partitions is how many events are handled at the same time, by all processes together; 1 to 256.
	// It can be changed: processes with another number wait until none with the old one runs. Default: 8.
	Partitions int
	// Batch is how many events [RunBatch] hands to a handler at most; 1 to 1000. It never waits for more.
	// Default: 100.
	Batch int
	// Timeout bounds a call of the handler: its context is done then, and a second later its connection is
	// closed. The partition waits for the handler's return. Default: 30 s.
	Timeout time.Duration
	// MaxAttempts is how often an event is tried until it is a dead letter. Default: 10.
	MaxAttempts int
	// Backoff is the pause after an event's first failure. It doubles with each failure, up to an hour.
	// Default: 1 s.
	Backoff time.Duration
	// SkipPoison lets later events of an aggregate pass one that failed. Default: false, they wait behind it.
	SkipPoison bool
	// Seen is how long a handled event is remembered, by the stream's time: one that is stored again is not
	// handled again. It should exceed the outbox's retention.archive_after. One event takes about 131
	// bytes. Default: 8 days; 2 hours at least.
	Seen time.Duration
	// SkipGaps goes on where the stream's limits deleted events before they were read. Default: false,
	// Run ends with [ErrGap].
	SkipGaps bool
	// Replays has events handled that `walpost replay` published again: each by its own ID, so also where the
	// event was handled before. A rebuilt consumer needs it. Default: false, they are passed over.
	Replays bool
	// Grace is how long handlers may go on when Run's context is done. Default: 10 s.
	Grace time.Duration

	// Logger gets what happens. Default: [slog.Default].
	Logger *slog.Logger
	// Metrics gets the consumer's metrics (docs/CONSUME.md). Default: none.
	Metrics prometheus.Registerer
	// Tracer makes a span outbox.process for each call of the handler, whose context has it: a child of the
	// span that the event's traceparent names, or with links to those of several events. Default: none.
	Tracer trace.Tracer
}

const (
	maxPartitions = 256
	maxBatch      = 1000
	maxBackoff    = time.Hour
	minSeen       = 2 * time.Hour
)

// check returns the configuration with its defaults, or every problem that it has.
func (c Config) check() (Config, error) {
	setDefault(&c.Schema, "public")
	setDefault(&c.Stream, "EVENTS")
	setDefault(&c.Partitions, 8)
	setDefault(&c.Batch, 100)
	setDefault(&c.Timeout, 30*time.Second)
	setDefault(&c.MaxAttempts, 10)
	setDefault(&c.Backoff, time.Second)
	setDefault(&c.Seen, 8*24*time.Hour)
	setDefault(&c.Grace, 10*time.Second)
	setDefault(&c.Logger, slog.Default())
	var problems []error
	require := func(ok bool, format string, args ...any) {
		if !ok {
			problems = append(problems, fmt.Errorf(format, args...))
		}
	}
	require(c.Name != "", "missing Name")
	require(c.NATS != nil, "missing NATS")
	require(c.Pool == nil || c.DB == nil, "both Pool and DB")
	require(c.Pool != nil || c.DB != nil, "missing Pool or DB")
	require(c.DB == nil || c.Direct != "", "missing Direct, which DB needs")
	within := func(n, most int, name string) {
		require(n > 0 && n <= most, "%s is %d: want 1 to %d", name, n, most)
	}
	within(c.Partitions, maxPartitions, "Partitions")
	within(c.Batch, maxBatch, "Batch")
	require(c.Timeout > 0 && c.Grace > 0 && c.Backoff > 0, "negative Timeout, Grace or Backoff")
	require(c.MaxAttempts > 0, "MaxAttempts is %d: want 1 or more", c.MaxAttempts)
	require(c.Seen >= minSeen, "Seen is %s: want %s or more", c.Seen, minSeen)
	_, err := parseStart(c.Start)
	require(err == nil, "%v", err)
	if c.Direct != "" {
		err := pg.CheckURL(c.Direct)
		require(err == nil, "read Direct: %w", err)
	}
	if err := errors.Join(problems...); err != nil {
		return c, hint.Errorf("see the fields of consume.Config", "configure consumer %q: %w", c.Name, err)
	}
	return c, nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

// parseStart returns the time of a Start, zero for "all" and "new".
func parseStart(start string) (at time.Time, err error) {
	if start == startAll || start == startNew {
		return at, nil
	}
	if at, err = time.Parse(time.RFC3339, start); err != nil {
		const want = `want "all", "new" or a time such as "2026-01-31T12:00:00Z"`
		return at, fmt.Errorf("field Start is %q: %s", start, want)
	}
	return at, nil
}

const (
	startAll = "all"
	startNew = "new"
)
