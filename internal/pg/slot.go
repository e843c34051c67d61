package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// OwnSlot is the condition on a row of pg_replication_slots under which a relay of the connection's database
// can have made the slot. The relay drops no other one.
const OwnSlot = `(plugin = 'pgoutput' AND database = current_database()
	AND NOT temporary AND NOT two_phase) IS TRUE`

// SlotGauges are sizes in bytes.
type SlotGauges struct {
	Retained     int64 `json:"retained_bytes"`      // WAL kept because of the slot
	Safe         int64 `json:"safe_bytes"`          // WAL until the slot is lost; -1 is no limit
	ConfirmedLag int64 `json:"confirmed_lag_bytes"` // WAL behind the confirmed LSN
}

// SlotState is a row of pg_replication_slots.
type SlotState struct {
	Name      string `json:"name"`
	Type      string `json:"type"` // logical, physical
	Plugin    string `json:"plugin"`
	Database  string `json:"database"`
	Temporary bool   `json:"temporary"`
	TwoPhase  bool   `json:"two_phase"`
	// Own: a relay of the connection's database can have made it, see [OwnSlot].
	Own       bool    `json:"-"`
	ActivePID *uint32 `json:"active_pid"` // nil where nothing streams it
	WALStatus string  `json:"wal_status"` // reserved, extended, unreserved or lost
	Restart   string  `json:"restart_lsn"`
	Confirmed string  `json:"confirmed_flush_lsn"`
	// Failover, Synced and Invalidation are of PostgreSQL 17; false and "" before.
	Failover     bool   `json:"failover"`
	Synced       bool   `json:"synced"`
	Invalidation string `json:"invalidation_reason"`
	SlotGauges
}

// ReadSlot looks a slot up, of whatever kind and database; nil is none.
func (db *DB) ReadSlot(ctx context.Context, name string) (*SlotState, error) {
	s := &SlotState{Name: name}
	err := db.QueryRow(ctx, []any{
		&s.Type, &s.Plugin, &s.Database, &s.Temporary, &s.TwoPhase, &s.Own, &s.ActivePID, &s.WALStatus,
		&s.Restart, &s.Confirmed,
		&s.Failover, &s.Synced, &s.Invalidation, &s.Retained, &s.Safe, &s.ConfirmedLag,
	}, `SELECT slot_type, coalesce(plugin, ''), coalesce(database, ''), temporary, two_phase,
		`+OwnSlot+`, active_pid::int8, coalesce(wal_status, ''),
		coalesce(restart_lsn::text, ''), coalesce(confirmed_flush_lsn::text, ''),
		coalesce((to_jsonb(s) ->> 'failover')::bool, false),
		coalesce((to_jsonb(s) ->> 'synced')::bool, false),
		coalesce(to_jsonb(s) ->> 'invalidation_reason', ''),
		coalesce(pg_wal_lsn_diff(here, restart_lsn), 0)::int8,
		CASE WHEN wal_status = 'lost' THEN 0 ELSE coalesce(safe_wal_size, -1) END::int8,
		coalesce(pg_wal_lsn_diff(here, confirmed_flush_lsn), 0)::int8
		FROM pg_replication_slots s, (SELECT CASE WHEN pg_is_in_recovery()
			THEN coalesce(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn())
			ELSE pg_current_wal_lsn() END AS here) w
		WHERE slot_name = $1`, name)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read slot %q: %w", name, err)
	}
	return s, nil
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
	err = db.QueryRow(ctx, []any{&has},
		`SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1)`, db.slot)
	if err != nil {
		return false, fmt.Errorf("look for the slot: %w", err)
	}
	return has, nil
}

// Confirmed is the slot's confirmed LSN; active is false where nobody streams it, or
// where there is none.
func (db *DB) Confirmed(ctx context.Context, slot string) (lsn outbox.LSN, active bool, err error) {
	var text string
	err = db.QueryRow(ctx, []any{&text, &active},
		`SELECT coalesce(max(confirmed_flush_lsn)::text, '0/0'), coalesce(bool_or(active), false)
		FROM pg_replication_slots WHERE slot_name = $1 AND database = current_database()`, slot)
	if err == nil {
		lsn, err = outbox.ParseLSN(text)
	}
	if err != nil {
		return 0, false, fmt.Errorf("read slot %q: %w", slot, err)
	}
	return lsn, active, nil
}

// DropSlot drops a slot where there is one that a relay can have made, see [OwnSlot]. Any other is left
// alone.
func (db *DB) DropSlot(ctx context.Context, name string) error {
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots
			WHERE slot_name = $1 AND `+OwnSlot, name)
		return err
	})
	if err != nil && Code(err) != pgerrcode.UndefinedObject { // somebody else was faster
		return fmt.Errorf("drop slot %q: %w", name, err)
	}
	return nil
}
