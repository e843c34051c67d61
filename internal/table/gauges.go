package table

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
)

// SlotGauges are sizes in bytes.
type SlotGauges struct {
	Retained     int64 `json:"retained_bytes"`      // WAL kept because of the slot
	Safe         int64 `json:"safe_bytes"`          // WAL until the slot is lost; -1 is no limit
	ConfirmedLag int64 `json:"confirmed_lag_bytes"` // WAL behind the confirmed LSN
}

// Slot reads the gauges of the relay's slot. Where there is none, nothing is kept, and
// nothing can be lost.
func (db *DB) Slot(ctx context.Context) (SlotGauges, error) {
	s, err := db.ReadSlot(ctx, db.slot)
	if s == nil {
		return SlotGauges{Safe: -1}, err
	}
	return s.SlotGauges, nil
}

// HasSlot reports whether the relay's slot exists.
func (db *DB) HasSlot(ctx context.Context) (has bool, err error) {
	err = db.QueryRow(ctx, []any{&has}, `SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1)`, db.slot)
	if err != nil {
		return false, fmt.Errorf("look for the slot: %w", err)
	}
	return has, nil
}

// SyncState is how the server counts the walsender of a process id: "async" is
// the only one that a relay can be. "" where it is not to be seen.
func (db *DB) SyncState(ctx context.Context, pid uint32) (state string, err error) {
	err = db.QueryRow(ctx, []any{&state}, `SELECT coalesce(sync_state, '') FROM pg_stat_replication WHERE pid = $1`, pid)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("read sync state: %w", err)
	}
	return state, nil
}

// SignOfLife is a text that changes while the walsender of a process id reads WAL or takes
// standby statuses, "" where it is not to be seen, and what the process waits for.
func (db *DB) SignOfLife(ctx context.Context, pid uint32) (life, waits string, err error) {
	err = db.QueryRow(ctx, []any{&life, &waits}, `SELECT coalesce(r.sent_lsn::text || ' ' || r.reply_time::text, ''),
			coalesce(a.wait_event_type || ' ' || a.wait_event, 'nothing')
		FROM pg_stat_replication r JOIN pg_stat_activity a USING (pid) WHERE pid = $1`, pid)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", "", fmt.Errorf("look at the walsender: %w", err)
	}
	return life, waits, nil
}

// DropSlot drops a slot where there is one that a relay can have made, see [pg.OwnSlot]. Any other is left alone.
func (db *DB) DropSlot(ctx context.Context, name string) error {
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
			WHERE slot_name = $1 AND `+pg.OwnSlot, name)
		return err
	})
	if err != nil && pg.Code(err) != pgerrcode.UndefinedObject { // somebody else was faster
		return fmt.Errorf("drop slot %q: %w", name, err)
	}
	return nil
}

// BlockerOf describes who a server process waits for, or "" where it cannot be
// told. A prepared transaction belongs to nobody's session.
func (db *DB) BlockerOf(ctx context.Context, pid uint32) (who string, err error) {
	err = db.QueryRow(ctx, []any{&who}, `SELECT coalesce(
		(SELECT format('pid %s, application %L, user %L, database %L, in its transaction since %s, last query: %s',
			a.pid, a.application_name, a.usename, a.datname, coalesce(a.xact_start::text, 'unknown'), left(a.query, 200))
			FROM pg_stat_activity a WHERE a.pid = ANY (pg_blocking_pids($1)) ORDER BY a.xact_start LIMIT 1),
		(SELECT format('prepared transaction %L of user %L in database %L, since %s', p.gid, p.owner, p.database, p.prepared)
			FROM pg_locks l JOIN pg_prepared_xacts p ON p.transaction = l.transactionid WHERE l.pid = $1 AND NOT l.granted LIMIT 1), '')`, int32(pid))
	if err != nil {
		return "", fmt.Errorf("look for who is waited for: %w", err)
	}
	return who, nil
}
