package table

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// A relay that delivers holds an advisory lock for each of its rows of outbox_sent, on the connection that
// holds the lock of its slot. A relay that would deliver some of the same rows waits. It holds the lock of
// its own slot and, for the other one to see, a shared lock with that one's process id.

// deliversKeySQL is the key of the lock for a row s of outbox_sent.
const deliversKeySQL = `hashtextextended('walpost/delivers/' ||
	ARRAY[s.outbox, s.source, s.shard, s.condition, s.stream, s.domain]::text, 0)`

// heldSQL has l, of pg_locks, be an advisory lock of this database with the key.
func heldSQL(key string) string {
	return `l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
		AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
		AND l.classid::int8 << 32 | l.objid::int8 = ` + key
}

// awaitsKey is the first half of the key of a relay that waits.
const awaitsKey int32 = 0x77616c77

// Deliverer is a relay that delivers: what, and its process at the server.
type Deliverer struct {
	Sent
	PID uint32
}

// Deliver has this relay begin with deliveries, unless another relay delivers some of the same rows: then it
// returns that one. Two relays that ask at the same time ask one after the other. Of deliveries that
// outbox_sent does not have yet it only says whether they may begin.
func (db *DB) Deliver(ctx context.Context, own []Sent) (other *Deliverer, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, lockSentSQL); err != nil {
				return err
			}
			known, exists, err := db.readSent(ctx, tx, SentPrivileges)
			if err != nil || !exists {
				return err
			}
			other, err = db.findDeliverer(ctx, tx, own, known, 0)
			if err != nil {
				return err
			}
			if other != nil {
				return db.await(ctx, tx, int32(other.PID))
			}
			if err := db.await(ctx, tx, 0); err != nil {
				return err
			}
			return db.takeDeliveries(ctx, tx, own, known)
		})
	})
	if err != nil {
		return nil, fmt.Errorf("look for relays that deliver the same rows: %w", err)
	}
	return other, nil
}

// takeDeliveries takes the locks of all deliveries, but for those that this relay holds. It takes none where
// one of them has no row.
func (db *DB) takeDeliveries(ctx context.Context, tx pgx.Tx, own, known []Sent) error {
	var rows []Sent
	for i := range known {
		for j := range own {
			if known[i].SameDelivery(&own[j]) {
				rows = append(rows, known[i])
			}
		}
	}
	if len(rows) < len(own) {
		return nil
	}
	_, err := tx.Exec(ctx, `SELECT pg_try_advisory_lock(`+deliversKeySQL+`) FROM `+db.own.sent+` s
		WHERE id = ANY($1) AND NOT EXISTS (SELECT FROM pg_locks l
			WHERE `+heldSQL(deliversKeySQL)+` AND l.pid = pg_backend_pid())`, ids(rows))
	return err
}

// Deliverer returns another relay that delivers some of the rows of these deliveries, nil where none does.
// holder, the process that holds the lock of the slot, is no other relay; 0 is none.
func (db *DB) Deliverer(ctx context.Context, own []Sent, holder uint32) (other *Deliverer, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		known, exists, err := db.readSent(ctx, conn, "SELECT")
		if err == nil && exists {
			other, err = db.findDeliverer(ctx, conn, own, known, holder)
		}
		return err
	})
	return other, err
}

func (db *DB) findDeliverer(
	ctx context.Context, q queryer, own, known []Sent, holder uint32,
) (*Deliverer, error) {
	shared := map[int64]*Sent{}
	var rows []Sent
	for i := range known {
		for j := range own {
			if known[i].SharesRows(&own[j]) {
				shared[known[i].id] = &known[i]
				rows = append(rows, known[i])
			}
		}
	}
	var id int64
	var pid int32
	err := q.QueryRow(ctx, `SELECT s.id, l.pid FROM `+db.own.sent+` s JOIN pg_locks l
			ON `+heldSQL(deliversKeySQL)+`
		WHERE s.id = ANY($1) AND l.pid <> ALL(ARRAY[pg_backend_pid(), $2]) ORDER BY s.id LIMIT 1`,
		ids(rows), int32(holder)).Scan(&id, &pid)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return &Deliverer{*shared[id], uint32(pid)}, nil
}

// await shows the process that this relay waits for; 0 is none.
func (db *DB) await(ctx context.Context, tx pgx.Tx, pid int32) error {
	if pid == db.awaited {
		return nil
	}
	_, err := tx.Exec(ctx, `SELECT pg_advisory_unlock_shared($1, $2) WHERE $2 <> 0
		UNION ALL SELECT pg_try_advisory_lock_shared($1, $3) WHERE $3 <> 0`,
		awaitsKey, db.awaited, pid)
	if err == nil {
		db.awaited = pid
	}
	return err
}

// Awaiting returns the process of a relay that waits for this one, 0 where none does.
func (db *DB) Awaiting(ctx context.Context) (pid uint32, err error) {
	err = db.QueryRow(ctx, []any{&pid}, `
		SELECT coalesce(min(pid), 0)::int8 FROM pg_locks
		WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND classid = $1::int8::oid
			AND objid = pg_backend_pid()::oid
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`,
		int64(awaitsKey))
	if err != nil {
		return 0, fmt.Errorf("look for a relay that waits for this one: %w", err)
	}
	return pid, nil
}
