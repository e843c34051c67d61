package pg

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
)

// A lock must not outlive its holder's ability to work: a relay that is stopped (SIGSTOP) or cut off loses
// its session, and the lock, after SessionTimeout of silence. A live one pings pingInterval apart.
const (
	SessionTimeout = 10 * time.Second
	pingInterval   = 500 * time.Millisecond
	// heldFor is how long an answer of the server shows that the lock is held.
	heldFor     = SessionTimeout / 2
	lockTimeout = 500 * time.Millisecond
)

// DB is a connection to a database, as the relay works on one: statements take turns, are short and look rows
// up by key. It is safe for concurrent use: mu guards conn, xid and lost.
type DB struct {
	slot  string        // of the relay; it names the advisory lock
	limit time.Duration // of a statement, by the server
	// Serves names what the relay delivers and where to, in any form; see [DB.HolderDiffers]. It is set
	// before the connection is used.
	Serves string

	// mu guards what follows: one statement at a time.
	mu      sync.Mutex
	conn    *pgx.Conn
	xid     uint64 // a recent transaction id with its epoch
	lost    error  // what the connection died of
	unbound bool   // see Unbind

	// answered is when the last statement that the server has answered was begun, after epoch.
	answered atomic.Int64
}

// epoch has a monotonic clock, which goes on while the process is stopped.
var epoch = time.Now()

// NewDB takes a connection over. slot is the relay's. The server ends a statement that takes longer than
// limit.
func NewDB(ctx context.Context, conn *pgx.Conn, slot string, limit time.Duration) (*DB, error) {
	db := &DB{conn: conn, slot: slot, limit: limit}
	return db, db.prepare(ctx)
}

// prepare sets what a pooler would refuse or lose as a start-up parameter.
func (db *DB) prepare(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, StatementTimeout)
	defer cancel()
	// Look-ups are by key, in batches: a plan that scans a queue table because
	// its statistics say it is empty would be a disaster an hour later. A search wants the first rows, and
	// no bitmap of all. And they are short: to compile one (jit) takes longer than to run it.
	sql := fmt.Sprintf(`SET idle_session_timeout = %d; SET idle_in_transaction_session_timeout = %[1]d;
		SET lock_timeout = %d;
		SET synchronous_commit = local; SET row_security = off; SET quote_all_identifiers = off;
		SET tcp_keepalives_idle = 5; SET tcp_keepalives_interval = 2; SET tcp_keepalives_count = 3;
		SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off;
		SET enable_bitmapscan = off; SET jit = off;
		SET statement_timeout = %d`,
		SessionTimeout.Milliseconds(), lockTimeout.Milliseconds(), db.limit.Milliseconds())
	if _, err := db.conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("prepare session: %w", err)
	}
	return db.ping(ctx)
}

// Unbind is for a connection that holds no lock and writes nothing that must last:
// it may be silent for as long as it likes, no commit waits for the disk, and a
// statement whose context is done ends, and the connection with it.
func (db *DB) Unbind(ctx context.Context) error {
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET idle_session_timeout = 0; SET synchronous_commit = off`)
		return err
	})
	db.EndWithContext()
	return err
}

// EndWithContext has a statement whose context is done end, and the connection with it. It is called before
// other goroutines use the connection.
func (db *DB) EndWithContext() { db.unbound = true }

// Conn lends the connection to checks that run before any goroutine uses DB.
func (db *DB) Conn() *pgx.Conn { return db.conn }

// AnyBytes reports whether text of the database may be no UTF-8.
func (db *DB) AnyBytes() bool { return AnyBytes(db.conn.PgConn()) }

// StatementTimeout ends a statement that hangs, and the connection with it. A slow server may take a good
// part of it to render a gigabyte of text, at which no limit of its own stops it. A dead peer is noticed
// sooner, by TCP keepalives.
const StatementTimeout = 2 * time.Minute

// SearchTimeout is the limit of a statement of a [DB.Search].
const SearchTimeout = 30 * time.Minute

// searching is the key of a context in which statements may take SearchTimeout.
type searching struct{}

// Search calls f for statements that may have to read all of a large table. If one of them takes longer than
// statements may, it calls f again with a context in which each may take SearchTimeout. Then they end with
// ctx, and the connection with them.
func (db *DB) Search(ctx context.Context, f func(context.Context) error) error {
	err := f(ctx)
	if Code(err) != pgerrcode.QueryCanceled || ctx.Err() != nil {
		return err
	}
	return f(context.WithValue(ctx, searching{}, true))
}

// Use runs statements as the connection's only user. They are not cancelled with
// ctx: pgx closes a connection whose statement is cancelled, and with it would go
// the lock. They are short, and StatementTimeout bounds them.
//
// What the connection died of is the error of every later statement too: pgx would
// only say that it is closed, and which statement comes first is chance.
func (db *DB) Use(ctx context.Context, f func(ctx context.Context, conn *pgx.Conn) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	timeout, searches := StatementTimeout, ctx.Value(searching{}) != nil
	if searches {
		timeout += SearchTimeout
	} else if !db.unbound {
		ctx = context.WithoutCancel(ctx)
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, timeout) // not while another statement runs
	defer cancel()
	if db.lost != nil {
		return fmt.Errorf("the connection is lost: %w", db.lost)
	}
	began := time.Since(epoch)
	run := f
	if searches {
		run = db.long(f)
	}
	err := run(ctx, db.conn)
	switch {
	case err == nil:
		db.answered.Store(int64(began))
	case db.conn.IsClosed():
		db.lost = err
	case Code(err) == pgerrcode.DuplicatePreparedStatement:
		// The server has one that pgx does not know of: it was made, and an error came behind it. It stays.
		db.lost = err
		_ = db.conn.Close(ctx)
	}
	if Code(err) == pgerrcode.LockNotAvailable {
		return hint.Wrap(err, "another session has a lock on the table, such as for ALTER TABLE: "+
			"end its transaction, or wait until it ends")
	}
	return err
}

// long has the statements of f take SearchTimeout each.
func (db *DB) long(
	f func(ctx context.Context, conn *pgx.Conn) error,
) func(ctx context.Context, conn *pgx.Conn) error {
	return func(ctx context.Context, conn *pgx.Conn) error {
		err := setTimeout(ctx, conn, SearchTimeout)
		if err == nil {
			err = f(ctx, conn)
		}
		if conn.IsClosed() {
			return err
		}
		if short := setTimeout(ctx, conn, db.limit); err == nil {
			err = short
		}
		return err
	}
}

func setTimeout(ctx context.Context, conn *pgx.Conn, d time.Duration) error {
	_, err := conn.Exec(ctx, fmt.Sprintf(`SET statement_timeout = %d`, d.Milliseconds()))
	return err
}

// Alive reports whether the connection, and so the lock, is still there as far
// as this side knows.
func (db *DB) Alive() bool {
	db.mu.Lock()
	defer db.mu.Unlock()
	return !db.conn.IsClosed()
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

// Held returns an error if the lock may be lost: a process that was stopped goes on where it was, and another
// relay may have the lock by then. It asks the server only if that has not answered for five seconds.
func (db *DB) Held() error {
	if time.Since(epoch)-time.Duration(db.answered.Load()) < heldFor {
		return nil
	}
	return db.Ping(context.Background())
}

// Ping asks the server for a sign of life.
func (db *DB) Ping(ctx context.Context) error {
	return db.Use(ctx, func(ctx context.Context, _ *pgx.Conn) error {
		ctx, cancel := context.WithTimeout(ctx, SessionTimeout)
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

// FullXID adds the epoch to a transaction id from the WAL: the nearest to a
// recent one.
func (db *DB) FullXID(xid uint32) uint64 {
	return db.xid + uint64(int64(int32(xid-uint32(db.xid))))
}

// User is the role that the connection was made as.
func (db *DB) User() string { return db.conn.Config().User }

// Limit bounds every later statement of the connection.
func (db *DB) Limit(ctx context.Context, d time.Duration) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		db.limit = d
		return setTimeout(ctx, conn, d)
	})
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

// QueryRow runs a query of one row.
func (db *DB) QueryRow(ctx context.Context, into []any, sql string, args ...any) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, sql, args...).Scan(into...)
	})
}

// QueryText runs a query and hands on each row's text, as the types' output functions
// render it and as the WAL has it. It is valid until each returns.
func (db *DB) QueryText(ctx context.Context, sql string, args []any, each func([][]byte) error) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		args = append([]any{pgx.QueryResultFormats{pgx.TextFormatCode}}, args...)
		rows, err := conn.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		defer rows.Close()
		for rows.Next() {
			if err := each(rows.RawValues()); err != nil {
				return err
			}
		}
		return rows.Err()
	})
}
