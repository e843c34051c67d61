package setup

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// HasRole reports whether the relay's role exists, and whether its password is known.
func (s *Setup) HasRole() (exists, known bool, err error) {
	known, err = s.hasPassword()
	return s.facts.RoleExists, known || s.cfg.NewPassword, err
}

// Publication looks at the publication that the configuration names. ours: it has one of the outboxes, so
// this relay was set up before. others are the tables that were added to it one by one, where none is an
// outbox: it is another relay's.
func (s *Setup) Publication(ctx context.Context) (ours bool, others []string, err error) {
	names := make([]string, len(s.cfg.Outboxes))
	for i, t := range s.cfg.Outboxes {
		names[i] = t.SQL()
	}
	err = s.conn.QueryRow(ctx, `WITH own AS (SELECT to_regclass(n) AS oid FROM unnest($2::text[]) n)
		SELECT EXISTS (SELECT FROM pg_publication_tables t
				JOIN pg_namespace n ON n.nspname = t.schemaname
				JOIN pg_class c ON c.relname = t.tablename AND c.relnamespace = n.oid
				JOIN own ON own.oid IN (c.oid, pg_partition_root(c.oid)) WHERE t.pubname = $1),
			ARRAY(SELECT r.prrelid::regclass::text FROM pg_publication_rel r
				JOIN pg_publication p ON p.oid = r.prpubid WHERE p.pubname = $1 ORDER BY 1)`,
		s.cfg.Publication, names).Scan(&ours, &others)
	if err != nil {
		return false, nil, fmt.Errorf("read publication %q: %w", s.cfg.Publication, err)
	}
	if ours {
		others = nil
	}
	return ours, others, nil
}

// Reads reports whether the relay's role may read all of the outboxes.
func (s *Setup) Reads(ctx context.Context) (reads bool, err error) {
	reads = s.facts.RoleExists
	for _, t := range s.cfg.Outboxes {
		if !reads {
			break
		}
		g := Grant{privileges("SELECT"), "TABLE", t.SQL(), s.cfg.Role}
		if reads, err = g.held(ctx, s.conn, s.cfg.Role); err != nil {
			return false, err
		}
	}
	return reads, nil
}

// HasProducer reports whether another role than the relay's and superusers may log in and insert into all of
// the outboxes.
func (s *Setup) HasProducer(ctx context.Context) (has bool, err error) {
	names := make([]string, len(s.cfg.Outboxes))
	for i, t := range s.cfg.Outboxes {
		names[i] = t.SQL()
	}
	err = s.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_roles r
		WHERE r.rolcanlogin AND NOT r.rolsuper AND r.rolname::text <> $1 AND NOT EXISTS (
			SELECT FROM unnest($2::text[]) n
			WHERE has_any_column_privilege(r.oid, to_regclass(n)::oid, 'INSERT') IS NOT TRUE))`,
		s.cfg.Role, names).Scan(&has)
	if err != nil {
		return false, fmt.Errorf("look for the application's role: %w", err)
	}
	return has, nil
}

// SlotUse is what is known of who uses a slot. The zero value is a slot that does not exist and that no
// relay of this database works for.
type SlotUse struct {
	Database string // of the slot
	Locked   bool   // a relay of this database has the lock of that slot
	Streams  bool   // its walsender sends another publication than the configuration's
}

const lockedSQL = `EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
	AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
	AND classid::int8 << 32 | objid::int8 = hashtextextended('walpost/' || $1, 0))`

// SlotUse looks at a slot and at the lock of its name.
func (s *Setup) SlotUse(ctx context.Context, slot string) (u SlotUse, err error) {
	err = s.conn.QueryRow(ctx, `SELECT `+lockedSQL, slot).Scan(&u.Locked)
	if err == nil {
		err = s.conn.QueryRow(ctx, `SELECT coalesce(s.database::text, 'none, as it is physical'),
				coalesce(a.query ~ 'publication_names' AND strpos(a.query, $2) = 0, false)
			FROM pg_replication_slots s LEFT JOIN pg_stat_activity a ON a.pid = s.active_pid
			WHERE s.slot_name::text = $1`,
			slot, "publication_names "+pg.QuoteLiteral(outbox.QuoteIdent(s.cfg.Publication)),
		).Scan(&u.Database, &u.Streams)
	}
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return u, fmt.Errorf("look for slot %s: %w", slot, err)
	}
	return u, nil
}

// Free reports whether a server has neither a role, nor a slot or its lock, nor a publication of these names.
func (s *Setup) Free(ctx context.Context, role, slot, publication string) (free bool, err error) {
	err = s.conn.QueryRow(ctx, `SELECT NOT `+lockedSQL+`
		AND NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name::text = $1)
		AND NOT EXISTS (SELECT FROM pg_roles WHERE rolname::text = $2)
		AND NOT EXISTS (SELECT FROM pg_publication WHERE pubname::text = $3)`,
		slot, role, publication).Scan(&free)
	if err != nil {
		return false, fmt.Errorf("look for free names: %w", err)
	}
	return free, nil
}

// SystemID is the server's system identifier, "" where the role may not read it.
func (s *Setup) SystemID(ctx context.Context) (id string, err error) {
	err = s.conn.QueryRow(ctx, `SELECT system_identifier::text FROM pg_control_system()`).Scan(&id)
	if err != nil && pg.Code(err) != pgerrcode.InsufficientPrivilege {
		return "", fmt.Errorf("read the system identifier: %w", err)
	}
	return id, nil
}
