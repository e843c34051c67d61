package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// lockKeySQL is the key of the advisory lock.
func (db *DB) lockKeySQL() string {
	return "hashtextextended(" + QuoteLiteral("walpost/"+db.slot) + ", 0)"
}

// tryLockSQL names the slot, and takes no argument: [DB.StandingBy] counts the sessions whose last query in
// pg_stat_activity is this text.
func (db *DB) tryLockSQL() string { return "SELECT pg_try_advisory_lock(" + db.lockKeySQL() + ")" }

// TryLock takes the lock that makes this relay the active one. It reports false
// where another relay holds it.
func (db *DB) TryLock(ctx context.Context) (bool, error) {
	var ok bool
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, db.tryLockSQL()).Scan(&ok)
	})
	if err != nil {
		return false, fmt.Errorf("take advisory lock: %w", err)
	}
	return ok, nil
}

// LockHolder is the session that holds the relay's lock; nil is none.
func (db *DB) LockHolder(ctx context.Context) (*Session, error) {
	var pid uint32
	err := db.QueryRow(ctx, []any{&pid}, `SELECT pid::int8 FROM pg_locks
		WHERE locktype = 'advisory' AND granted AND objsubid = 1
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND classid::int8 << 32 | objid::int8 = `+db.lockKeySQL())
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look for the holder of the lock: %w", err)
	}
	s, err := db.ReadSession(ctx, pid)
	if s == nil && err == nil {
		return &Session{PID: pid}, nil // it has just ended
	}
	return s, err
}

// StandingBy counts the relays that wait for the lock: what they ask is their connection's last query. Relays
// of one slot have one role, so those of other roles are other relays. known is false where the role may not
// see the holder's.
func (db *DB) StandingBy(ctx context.Context, holder *Session) (n int, known bool, err error) {
	var holds uint32
	role := db.User()
	if holder != nil {
		holds, role = holder.PID, holder.User
	}
	err = db.QueryRow(ctx, []any{&n, &known},
		`SELECT count(*) FILTER (WHERE query = $1)::int,
			count(*) FILTER (WHERE backend_start IS NULL AND usename::text = $3) = 0
		FROM pg_stat_activity a WHERE datname = current_database() AND application_name = 'walpost'
			AND pid <> $2
			AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = a.pid)`,
		db.tryLockSQL(), int32(holds), role)
	if err != nil {
		return 0, false, fmt.Errorf("count the relays that stand by: %w", err)
	}
	return n, known && (holder == nil || !holder.Hidden()), nil
}
