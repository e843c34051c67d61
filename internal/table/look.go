package table

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// What is here looks at a relay's work from outside: it takes no lock of the relay's, changes nothing,
// and works on a standby, too.

// Session is a server process and who is served.
type Session struct {
	PID         uint32 `json:"pid"`
	Application string `json:"application_name"`
	User        string `json:"user"`
	// Client is an address, or "local" for a Unix socket, and Since when it connected. Both are
	// nil where the role may not see them (pg_read_all_stats).
	Client *string    `json:"client_address"`
	Since  *time.Time `json:"connected_since"`
}

// Hidden reports whether the role may not see all of it.
func (s *Session) Hidden() bool { return s.Since == nil }

// ReadSession looks a server process up; nil is none. A slot's walsender is one, too.
func (db *DB) ReadSession(ctx context.Context, pid uint32) (*Session, error) {
	s := &Session{PID: pid}
	err := db.QueryRow(ctx, []any{&s.Application, &s.User, &s.Client, &s.Since}, `SELECT coalesce(application_name, ''), coalesce(usename::text, ''),
		CASE WHEN client_port = -1 THEN 'local' ELSE host(client_addr) END, backend_start FROM pg_stat_activity WHERE pid = $1`, int32(pid))
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look at process %d: %w", pid, err)
	}
	return s, nil
}

// LockHolder is the session that holds the relay's lock; nil is none.
func (db *DB) LockHolder(ctx context.Context) (*Session, error) {
	var pid uint32
	err := db.QueryRow(ctx, []any{&pid}, `SELECT pid::int8 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
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

// StandingBy counts the relays that wait for the lock: what they ask is their connection's last
// query. known is false where the role may not see everybody's.
func (db *DB) StandingBy(ctx context.Context, holder *Session) (n int, known bool, err error) {
	var holds uint32
	if holder != nil {
		holds = holder.PID
	}
	err = db.QueryRow(ctx, []any{&n, &known}, `SELECT count(*) FILTER (WHERE query = $1)::int, count(*) FILTER (WHERE backend_start IS NULL) = 0
		FROM pg_stat_activity a WHERE datname = current_database() AND application_name = 'walpost' AND pid <> $2
			AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = a.pid)`, db.tryLockSQL(), int32(holds))
	if err != nil {
		return 0, false, fmt.Errorf("count the relays that stand by: %w", err)
	}
	return n, known, nil
}

// SlotState is a row of pg_replication_slots.
type SlotState struct {
	Name      string `json:"name"`
	Type      string `json:"type"` // logical, physical
	Plugin    string `json:"plugin"`
	Database  string `json:"database"`
	Temporary bool   `json:"temporary"`
	TwoPhase  bool   `json:"two_phase"`
	// Own: a relay of the connection's database can have made it, see [pg.OwnSlot].
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
		&s.Type, &s.Plugin, &s.Database, &s.Temporary, &s.TwoPhase, &s.Own, &s.ActivePID, &s.WALStatus, &s.Restart, &s.Confirmed,
		&s.Failover, &s.Synced, &s.Invalidation, &s.Retained, &s.Safe, &s.ConfirmedLag,
	}, `SELECT slot_type, coalesce(plugin, ''), coalesce(database, ''), temporary, two_phase,
		`+pg.OwnSlot+`, active_pid::int8, coalesce(wal_status, ''),
		coalesce(restart_lsn::text, ''), coalesce(confirmed_flush_lsn::text, ''),
		coalesce((to_jsonb(s) ->> 'failover')::bool, false), coalesce((to_jsonb(s) ->> 'synced')::bool, false),
		coalesce(to_jsonb(s) ->> 'invalidation_reason', ''),
		coalesce(pg_wal_lsn_diff(here, restart_lsn), 0)::int8,
		CASE WHEN wal_status = 'lost' THEN 0 ELSE coalesce(safe_wal_size, -1) END::int8,
		coalesce(pg_wal_lsn_diff(here, confirmed_flush_lsn), 0)::int8
		FROM pg_replication_slots s, (SELECT CASE WHEN pg_is_in_recovery()
			THEN coalesce(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) ELSE pg_current_wal_lsn() END AS here) w
		WHERE slot_name = $1`, name)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read slot %q: %w", name, err)
	}
	return s, nil
}

// RecordedCount counts the rows in which a failure is recorded, parked and held together up to a
// limit. The layout has columns for that.
func (db *DB) RecordedCount(ctx context.Context, t *outbox.Table, limit int) (parked, held int, err error) {
	err = db.QueryRow(ctx, []any{&parked, &held}, fmt.Sprintf(`SELECT count(*) FILTER (WHERE NOT held)::int, count(*) FILTER (WHERE held)::int
		FROM (SELECT t.%s LIKE '%s%%' AS held FROM %s t WHERE %s LIMIT %d) r`, t.Column(outbox.LastError), Held, t.SQL(), recordedSQL(t), limit))
	if err != nil {
		return 0, 0, fmt.Errorf("count recorded rows of %s: %w", t, err)
	}
	return parked, held, nil
}

// ExplainRead adds to the error of a count what helps: of an outbox, or of the dead letters where t
// is nil.
func (db *DB) ExplainRead(ctx context.Context, t *outbox.Table, err error) error {
	user := db.User()
	switch pg.Code(err) {
	case pgerrcode.LockNotAvailable:
		return hint.Wrap(err, "another session has the table locked, such as for ALTER TABLE: look again when its transaction has ended")
	case pgerrcode.QueryCanceled:
		return hint.Wrap(err, "it would have taken too long: the indexes that `walpost migrate print` has on the canonical table make it quick")
	}
	if t == nil {
		return ExplainLetters(err, user)
	}
	switch pg.Code(err) {
	case pgerrcode.UndefinedTable:
		return hint.Wrap(err, "run `walpost migrate up`, or name the table in outboxes[].table")
	case pgerrcode.UndefinedColumn:
		return hint.Wrap(err, "say in outboxes[].layout what the table calls its columns")
	case pgerrcode.InsufficientPrivilege:
		return hint.Wrap(err, db.adviseGrant(ctx, t, outbox.QuoteIdent(user)))
	}
	return err
}

// adviseGrant asks the catalog, which everybody may read, what keeps the role from reading a table.
func (db *DB) adviseGrant(ctx context.Context, t *outbox.Table, role string) string {
	var reaches, hidden bool
	err := db.QueryRow(ctx, []any{&reaches, &hidden}, `SELECT has_schema_privilege(n.oid, 'USAGE'), row_security_active(c.oid) AND has_table_privilege(c.oid, 'SELECT')
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = $1 AND c.relname = $2`, t.Schema, t.Name)
	if err == nil && hidden {
		return fmt.Sprintf("row-level security would hide rows: ALTER ROLE %s BYPASSRLS, or make it the table's owner", role)
	}
	grants := fmt.Sprintf("GRANT SELECT ON %s TO %s", t.SQL(), role)
	if err == nil && !reaches {
		grants = fmt.Sprintf("GRANT USAGE ON SCHEMA %s TO %s; ", outbox.QuoteIdent(t.Schema), role) + grants
	}
	return "as the table's owner: " + grants
}
