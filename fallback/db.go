package fallback

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Config says how to reach the database.
type Config struct {
	URL   string
	Files pg.Files // beside the URL
	// Settings are sent as run-time parameters; they fix how values render.
	Settings map[string]string
	// Dial opens TCP connections with keepalives set.
	Dial pgconn.DialFunc
	// Slot names the advisory lock.
	Slot string
	// Schema is the first outbox's. Walpost's own tables are looked for there, and then in the role's own search_path.
	Schema string
}

// The lock must not outlive its holder's ability to work: a relay that is
// stopped (SIGSTOP) or cut off loses its session, and the lock, after
// sessionTimeout of silence, and a live one pings pingInterval apart.
const (
	sessionTimeout = 10 * time.Second
	pingInterval   = 500 * time.Millisecond
	lockTimeout    = 500 * time.Millisecond
)

// DB is the relay's connection to its database. It is safe for concurrent use:
// statements take turns.
type DB struct {
	slot string
	own  ownTables

	// mu guards what follows: one statement at a time.
	mu   sync.Mutex
	conn *pgx.Conn
	xid  uint64 // a recent transaction id with its epoch
	lost error  // what the connection died of

	unbound bool // see Unbind

	portion portionSize // of statements that hash rows
	marks   sync.Map    // the statement that marks, by outbox.Table: to write it costs as much as to mark some rows
}

// Open connects without taking the lock.
func Open(ctx context.Context, cfg Config) (*DB, error) {
	conn, err := Connect(ctx, cfg)
	if err != nil {
		return nil, err
	}
	db := &DB{slot: cfg.Slot, conn: conn}
	err = db.prepare(ctx)
	if err == nil {
		db.own, err = findOwn(ctx, conn, cfg.Schema)
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return db, nil
}

// Connect opens a connection without the settings of [Open]. Its error carries advice.
func Connect(ctx context.Context, cfg Config) (*pgx.Conn, error) {
	conn, err := pg.Connect(ctx, cfg.connection())
	if err != nil {
		return nil, explainConnect(err)
	}
	return conn, nil
}

func (cfg Config) connection() pg.Config {
	return pg.Config{URL: cfg.URL, Files: cfg.Files, Settings: cfg.Settings, Dial: cfg.Dial}
}

func explainConnect(err error) error {
	if err == nil || hint.Of(err) != "" {
		return err
	}
	switch pg.Code(err) {
	case pgerrcode.InvalidPassword, pgerrcode.InvalidAuthorizationSpecification:
		return hint.Wrap(err, "check user and password of postgres.url, and pg_hba.conf")
	case pgerrcode.InvalidCatalogName:
		return hint.Wrap(err, "check the database name at the end of postgres.url")
	case pgerrcode.InsufficientPrivilege:
		return hint.Wrap(err, "GRANT CONNECT ON DATABASE ... TO the role of postgres.url")
	case pgerrcode.TooManyConnections:
		return hint.Wrap(err, "raise max_connections: a relay takes up to six")
	case pgerrcode.ProtocolViolation:
		return hint.Wrap(err, pg.DirectHint)
	case "":
		if strings.Contains(err.Error(), "tls error: ") {
			return hint.Wrap(err, "enable TLS on the server and name its authority (sslrootcert=...), or change sslmode in postgres.url")
		}
		return hint.Wrap(err, "check host and port of postgres.url, and that a PostgreSQL server answers there")
	}
	return err
}

// prepare sets what a pooler would refuse or lose as a start-up parameter.
func (db *DB) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	// Look-ups are by key, in batches: a plan that scans a queue table because
	// its statistics say it is empty would be a disaster an hour later. And they are short: to compile
	// one (jit) takes longer than to run it.
	sql := fmt.Sprintf(`SET idle_session_timeout = %d; SET idle_in_transaction_session_timeout = %[1]d; SET lock_timeout = %d;
		SET synchronous_commit = local; SET row_security = off;
		SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3;
		SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off; SET jit = off; SET statement_timeout = %d`,
		sessionTimeout.Milliseconds(), lockTimeout.Milliseconds(), statementLimit.Milliseconds())
	if _, err := db.conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("prepare session: %w", err)
	}
	return db.ping(ctx)
}

// Unbind is for a connection that holds no lock and writes nothing that must last:
// it may be silent for as long as it likes, no commit waits for the disk, and a
// statement whose context is done ends, and the connection with it.
func (db *DB) Unbind(ctx context.Context) error {
	err := db.do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET idle_session_timeout = 0; SET synchronous_commit = off`)
		return err
	})
	db.unbound = true
	return err
}

// Conn lends the connection to checks that run before any goroutine uses DB.
func (db *DB) Conn() *pgx.Conn { return db.conn }

// Use lends the connection for statements that change nothing and lock no table for long.
func (db *DB) Use(ctx context.Context, f func(ctx context.Context, conn *pgx.Conn) error) error {
	return db.do(ctx, f)
}

// AnyBytes reports whether text of the database may be no UTF-8.
func (db *DB) AnyBytes() bool { return pg.AnyBytes(db.conn.PgConn()) }

// statementTimeout ends a statement that hangs, and the connection with it.
const statementTimeout = 30 * time.Second

// do runs statements as the connection's only user. They are not cancelled with
// ctx: pgx closes a connection whose statement is cancelled, and with it would go
// the lock. They are short, and statementTimeout bounds them.
//
// What the connection died of is the error of every later statement too: pgx would
// only say that it is closed, and which statement comes first is chance.
func (db *DB) do(ctx context.Context, f func(ctx context.Context, conn *pgx.Conn) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if !db.unbound {
		ctx = context.WithoutCancel(ctx)
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, statementTimeout) // not while another statement runs
	defer cancel()
	if db.lost != nil {
		return fmt.Errorf("the connection is lost: %w", db.lost)
	}
	err := f(ctx, db.conn)
	if err != nil && db.conn.IsClosed() {
		db.lost = err
	}
	return err
}

// Alive reports whether the connection, and so the lock, is still there as far
// as this side knows.
func (db *DB) Alive() bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	return !db.conn.IsClosed()
}

// lockKeySQL is the key of the advisory lock.
func (db *DB) lockKeySQL() string {
	return "hashtextextended(" + pg.QuoteLiteral("walpost/"+db.slot) + ", 0)"
}

// tryLockSQL names the slot, and takes no argument: by this text in pg_stat_activity those are counted that stand by.
func (db *DB) tryLockSQL() string { return "SELECT pg_try_advisory_lock(" + db.lockKeySQL() + ")" }

// TryLock takes the lock that makes this relay the active one. It reports false
// where another relay holds it.
func (db *DB) TryLock(ctx context.Context) (bool, error) {
	var ok bool
	err := db.do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, db.tryLockSQL()).Scan(&ok)
	})
	if err != nil {
		return false, fmt.Errorf("take advisory lock: %w", err)
	}
	return ok, nil
}

// Watch pings until ctx is done (nil) or the connection has failed. A server
// that shuts down is noticed within pingInterval.
func (db *DB) Watch(ctx context.Context) error {
	t := time.NewTicker(pingInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-t.C:
		}
		if err := db.Ping(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

// Ping asks the server for a sign of life.
func (db *DB) Ping(ctx context.Context) error {
	return db.do(ctx, func(ctx context.Context, _ *pgx.Conn) error {
		ctx, cancel := context.WithTimeout(ctx, sessionTimeout)
		defer cancel()
		return db.ping(ctx)
	})
}

func (db *DB) ping(ctx context.Context) error {
	var xmax string
	err := db.conn.QueryRow(ctx, `SELECT pg_snapshot_xmax(pg_current_snapshot())::text`).Scan(&xmax)
	if err != nil {
		return fmt.Errorf("ping PostgreSQL: %w", err)
	}
	db.xid, err = strconv.ParseUint(xmax, 10, 64)
	return err
}

// fullXID adds the epoch to a transaction id from the WAL: the nearest to a
// recent one.
func (db *DB) fullXID(xid uint32) uint64 {
	return db.xid + uint64(int64(int32(xid-uint32(db.xid))))
}

// InsertLSN is pg_current_wal_insert_lsn().
func (db *DB) InsertLSN(ctx context.Context) (outbox.LSN, error) {
	var s string
	err := db.do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&s)
	})
	if err != nil {
		return 0, fmt.Errorf("read insert LSN: %w", err)
	}
	return outbox.ParseLSN(s)
}

// Running tells of the transactions with an id the oldest that a snapshot has as running, or the next one, and the
// newest that is running, or 0. One whose commit waits for a synchronous standby is running, wherever its WAL is.
func (db *DB) Running(ctx context.Context) (oldest, newest uint64, err error) {
	err = db.do(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var xmin, xid string
		err := conn.QueryRow(ctx, `SELECT pg_snapshot_xmin(pg_current_snapshot())::text, coalesce((SELECT l.transactionid::text FROM pg_locks l
			WHERE l.locktype = 'transactionid' AND l.granted AND l.mode = 'ExclusiveLock' ORDER BY age(l.transactionid) LIMIT 1), '')`).Scan(&xmin, &xid)
		if err != nil {
			return err
		}
		if oldest, err = strconv.ParseUint(xmin, 10, 64); err != nil || xid == "" {
			return err
		}
		n, err := strconv.ParseUint(xid, 10, 32)
		newest = db.fullXID(uint32(n))
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("read running transactions: %w", err)
	}
	return oldest, newest, nil
}

// Cut ends the connection under a statement that hangs, which only the server knows the
// outcome of then.
func (db *DB) Cut() { _ = db.conn.PgConn().Conn().Close() }

// Close gives up the connection and with it the lock.
func (db *DB) Close() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	db.mu.Lock()
	defer db.mu.Unlock()
	_ = db.conn.Close(ctx)
}

// Away reports whether a connection to the server could not be made, or was lost without a
// word from it.
func Away(err error) bool {
	var connect *pgconn.ConnectError
	return errors.As(err, &connect) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

// Passing reports whether a statement failed for a reason that goes away by
// itself: a lock that another session holds (ALTER TABLE), a deadlock, a full
// disk.
func Passing(err error) bool {
	switch pg.Code(err) {
	case pgerrcode.LockNotAvailable, pgerrcode.DeadlockDetected, pgerrcode.SerializationFailure, pgerrcode.QueryCanceled,
		pgerrcode.DiskFull, pgerrcode.OutOfMemory:
		return true
	}
	return false
}
