package pg

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"

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
		err := conn.QueryRow(ctx, db.tryLockSQL()).Scan(&ok)
		if err != nil || !ok || db.Serves == "" {
			return err
		}
		// Any number of sessions may share it; where another program has it alone, nothing is known.
		_, err = conn.Exec(ctx,
			fmt.Sprintf("SELECT pg_try_advisory_lock_shared(%d, %d)", servesKey, db.servesHash()))
		return err
	})
	if err != nil {
		return false, fmt.Errorf("take advisory lock: %w", err)
	}
	return ok, nil
}

// servesKey is the first half of a second key that the lock's holder has, in the same session. The other half
// is the hash of what it serves.
const servesKey int32 = 0x77616c70

func (db *DB) servesHash() int32 {
	h := fnv.New32a()
	_, _ = h.Write([]byte(db.Serves))
	return int32(h.Sum32())
}

// HolderDiffers reports whether the lock's holder serves something else than this relay would. It is false
// where nobody holds the lock, and where nothing is known, as of a holder that is an older walpost.
func (db *DB) HolderDiffers(ctx context.Context) (differs bool, err error) {
	err = db.QueryRow(ctx, []any{&differs}, fmt.Sprintf(
		`SELECT coalesce(bool_and(s.objid <> (%d)::oid), false)
		FROM pg_locks l JOIN pg_locks s ON s.pid = l.pid AND s.database = l.database
		WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
		AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND l.classid::int8 << 32 | l.objid::int8 = %s
		AND s.locktype = 'advisory' AND s.granted AND s.objsubid = 2 AND s.classid = (%d)::oid`,
		db.servesHash(), db.lockKeySQL(), servesKey))
	if err != nil {
		return false, fmt.Errorf("look at what the holder of the lock serves: %w", err)
	}
	return differs && db.Serves != "", nil
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
