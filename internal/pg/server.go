package pg

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// InsertLSN is pg_current_wal_insert_lsn().
func (db *DB) InsertLSN(ctx context.Context) (outbox.LSN, error) {
	var s string
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, `SELECT pg_current_wal_insert_lsn()::text`).Scan(&s)
	})
	if err != nil {
		return 0, fmt.Errorf("read insert LSN: %w", err)
	}
	return outbox.ParseLSN(s)
}

// Running tells of the transactions with an id the oldest that a snapshot has as running, or the next one,
// and the newest that is running, or 0. One whose commit waits for a synchronous standby is running, wherever
// its WAL is.
func (db *DB) Running(ctx context.Context) (oldest, newest uint64, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var xmin, xid string
		err := conn.QueryRow(ctx, `SELECT pg_snapshot_xmin(pg_current_snapshot())::text, coalesce((
			SELECT l.transactionid::text FROM pg_locks l
			WHERE l.locktype = 'transactionid' AND l.granted AND l.mode = 'ExclusiveLock'
			ORDER BY age(l.transactionid) LIMIT 1), '')`).Scan(&xmin, &xid)
		if err != nil {
			return err
		}
		if oldest, err = strconv.ParseUint(xmin, 10, 64); err != nil || xid == "" {
			return err
		}
		n, err := strconv.ParseUint(xid, 10, 32)
		newest = db.FullXID(uint32(n))
		return err
	})
	if err != nil {
		return 0, 0, fmt.Errorf("read running transactions: %w", err)
	}
	return oldest, newest, nil
}

// NewXID takes a transaction id: every transaction that has written anything by
// now has a lesser one.
func (db *DB) NewXID(ctx context.Context) (xid int64, err error) {
	if err = db.QueryRow(ctx, []any{&xid}, `SELECT pg_current_xact_id()::text::bigint`); err != nil {
		return 0, fmt.Errorf("take a transaction id: %w", err)
	}
	return xid, nil
}

// EndedBefore reports whether every transaction with an id below xid has ended: what
// it has committed is visible.
func (db *DB) EndedBefore(ctx context.Context, xid int64) (ended bool, err error) {
	err = db.QueryRow(ctx, []any{&ended},
		`SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= $1`, xid)
	if err != nil {
		return false, fmt.Errorf("look for transactions that are open: %w", err)
	}
	return ended, nil
}

// Flush has the server flush its WAL up to what was written when it is called:
// transactions are visible before, with synchronous_commit off, and a crash would
// take them back. The walsender sends only what is flushed, too.
func (db *DB) Flush(ctx context.Context) error {
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `
			SELECT set_config('synchronous_commit', 'local', true),
				pg_logical_emit_message(true, 'walpost', '')
			WHERE pg_current_wal_insert_lsn() > pg_current_wal_flush_lsn()`)
		return err
	})
	if err != nil {
		return fmt.Errorf("flush the WAL: %w", err)
	}
	return nil
}

// Now is the server's time.
func (db *DB) Now(ctx context.Context) (now time.Time, err error) {
	if err = db.QueryRow(ctx, []any{&now}, `SELECT clock_timestamp()`); err != nil {
		return now, fmt.Errorf("read the server's time: %w", err)
	}
	return now, nil
}

// ClockDifference is how far the server's clock is ahead of this machine's, and how far
// that may be wrong: half the time that the quickest of some answers took.
func (db *DB) ClockDifference(ctx context.Context) (ahead, give time.Duration, err error) {
	give = time.Hour
	for range 5 {
		began := time.Now()
		now, err := db.Now(ctx)
		if err != nil {
			return 0, 0, err
		}
		if half := time.Since(began) / 2; half < give {
			ahead, give = now.Sub(began.Add(half)), half
		}
	}
	return ahead, give, nil
}

// Identify says which server this is: the system identifier, which is empty where
// the role may not know it, the timeline and the database. It is for where no
// replication connection is to be had.
func (db *DB) Identify(ctx context.Context) (system string, timeline uint32, database string, err error) {
	var file string
	err = db.QueryRow(ctx, []any{&file, &database},
		`SELECT pg_walfile_name(pg_current_wal_lsn()), current_database()::text`)
	if err == nil {
		err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
			system, err = SystemIdentifier(ctx, conn)
			return err
		})
	}
	if err != nil {
		return "", 0, "", fmt.Errorf("identify the server: %w", err)
	}
	n, err := strconv.ParseUint(file[:8], 16, 32)
	return system, uint32(n), database, err
}

// SystemIdentifier reads the system identifier of the server. It is empty where the role may not know it.
func SystemIdentifier(ctx context.Context, conn *pgx.Conn) (system string, err error) {
	var may bool
	err = conn.QueryRow(ctx, `SELECT has_function_privilege('pg_control_system()', 'EXECUTE')`).Scan(&may)
	if err == nil && may {
		err = conn.QueryRow(ctx, `SELECT system_identifier::text FROM pg_control_system()`).Scan(&system)
	}
	return system, err
}

// Server is what a server says of itself.
type Server struct {
	Version  string `json:"version"`
	Database string `json:"database"`
	Standby  bool   `json:"standby"`
}

// Server asks for it.
func (db *DB) Server(ctx context.Context) (s Server, err error) {
	err = db.QueryRow(ctx, []any{&s.Version, &s.Database, &s.Standby},
		`SELECT current_setting('server_version'), current_database()::text, pg_is_in_recovery()`)
	if err != nil {
		return s, fmt.Errorf("read server settings: %w", err)
	}
	return s, nil
}
