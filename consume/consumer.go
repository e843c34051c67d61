package consume

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/consumers"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
)

// consumer is one process's part of a consumer.
type consumer struct {
	Config
	handler    handler
	stream     *jetstream.Stream
	definition definition
	liveness   string // client_connection_check_interval in milliseconds; 0 where the server has none
	metrics    *metrics
	waits      *waits
}

// fatal marks an error that ends Run.
type fatal struct{ error }

func (f fatal) Unwrap() error { return f.error }

// run makes one session after the other.
func run(ctx context.Context, cfg Config, form func(Config) (handler, error)) error {
	cfg, err := cfg.check()
	if err != nil {
		return err
	}
	c := &consumer{Config: cfg, waits: newWaits(&cfg)}
	if c.handler, err = form(cfg); err != nil {
		return hint.Errorf("see the fields of consume.Config", "configure consumer %q: %w", cfg.Name, err)
	}
	stream := jetstream.StreamConfig{Name: cfg.Stream, Domain: cfg.Domain}
	c.stream, err = jetstream.NewStream(cfg.NATS, stream)
	if err != nil {
		return err
	}
	if c.metrics, err = newMetrics(&cfg); err != nil {
		return hint.Errorf("give each consumer of a process another Name, or leave Metrics out",
			"register metrics of consumer %q: %w", cfg.Name, err)
	}
	defer c.metrics.unregister()
	pause := firstPause
	for {
		begun := time.Now()
		err := c.session(ctx)
		var end fatal
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.As(err, &end), errors.Is(err, ErrGap):
			return err
		case time.Since(begun) > longestWait:
			pause = firstPause
		}
		c.waits.set("run", err)
		sleep.For(ctx, pause)
		pause = min(2*pause, longestWait)
	}
}

// session owns partitions and handles their events until the connection with the locks is lost, the stream is
// not the same any more, or ctx is done.
func (c *consumer) session(ctx context.Context) error {
	conn, err := c.connect(ctx)
	if err != nil {
		return err
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if err := c.agree(ctx, conn); err != nil {
		return err
	}
	return newMember(c, conn).run(ctx)
}

// connect opens the connection that holds the locks. While it lives, no other process has its partitions.
func (c *consumer) connect(ctx context.Context) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	var conn *pgx.Conn
	var err error
	if c.Direct == "" {
		conn, err = pg.ConnectBeside(ctx, c.Pool)
	} else {
		conn, err = pg.Connect(ctx, pg.Config{URL: c.Direct})
	}
	if err != nil {
		return nil, err
	}
	if err := c.prepare(ctx, conn); err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
		return nil, err
	}
	return conn, nil
}

// prepare refuses a pooler, which may give the same locks to two processes. The server ends the connection of
// a frozen process.
func (c *consumer) prepare(ctx context.Context, conn *pgx.Conn) error {
	var pid uint32
	if err := conn.QueryRow(ctx, `SELECT pg_catalog.pg_backend_pid()`).Scan(&pid); err != nil {
		return err
	}
	if pid != conn.PgConn().PID() {
		return hint.Errorf("set Direct to a URL that leads to PostgreSQL itself",
			"hold the locks of partitions: %w", fatal{errors.New("a connection pooler is between")})
	}
	for name, value := range map[string]string{
		"search_path": "pg_catalog", "application_name": "walpost consume " + c.Name,
		"idle_session_timeout": milliseconds(freezeTimeout),
		"statement_timeout":    milliseconds(statementTimeout), "lock_timeout": milliseconds(lockTimeout),
	} {
		_, err := conn.Exec(ctx, `SELECT pg_catalog.set_config($1::text, $2::text, false)`, name, value)
		if err != nil {
			return err
		}
	}
	// Not every platform's server can look at its client during a statement.
	const liveness = `SELECT set_config('client_connection_check_interval', '500', true)`
	c.liveness = "500"
	if _, err := conn.Exec(ctx, liveness); err != nil {
		c.liveness = "0"
	}
	return nil
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

const (
	// freezeTimeout is when the server ends the connection of a process that does nothing.
	freezeTimeout = 10 * time.Second
	// lockTimeout bounds the wait for a transaction of a partition's earlier owner, and that for a change of
	// the definition. The locks of other partitions are held meanwhile.
	lockTimeout = 500 * time.Millisecond
)

func (c *consumer) lockKey(number int) int64 { return consumers.LockKey(c.Schema, c.Name, number) }
