package stream

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// ErrCannotStream means that this server, or this role in it, cannot have its WAL
// decoded. The tables can be polled.
var ErrCannotStream = errors.New("the WAL cannot be read")

// ErrNoFreeSlot means that the slot could not be made now.
var ErrNoFreeSlot = errors.New("no replication slot is free")

// CheckServer reports why the server of the connection cannot be read, which is
// ErrCannotStream where only the WAL cannot. It changes nothing.
func CheckServer(ctx context.Context, conn *pgx.Conn, slot string) error {
	problems, err := ServerProblems(ctx, conn, slot)
	if err != nil {
		return err
	}
	return problems.FirstError()
}

// ServerProblems are all that [CheckServer] reports the first of.
func ServerProblems(ctx context.Context, conn *pgx.Conn, slot string) (check.Findings, error) {
	f, err := readServer(ctx, conn, slot)
	if err != nil {
		return nil, err
	}
	return f.problems(slot), nil
}

// Probe opens a replication connection, as every session does, and looks at the
// slot if there is one: what could never be streamed is said at the start. It
// returns what the server says of itself, and changes nothing.
func Probe(ctx context.Context, server pg.Config, slot string) (System, error) {
	conn, err := connect(ctx, server)
	if err != nil {
		return System{}, err
	}
	defer closeConn(conn)
	sys, err := identify(ctx, conn)
	if err != nil {
		return System{}, err
	}
	switch _, err := readSlot(ctx, conn, slot); {
	case errors.Is(err, ErrNoSlot), errors.Is(err, ErrSlotLost):
		return sys, checkNewName(ctx, conn, slot)
	case err != nil:
		return System{}, err
	}
	return sys, nil
}

// checkNewName: a lasting slot under the name of the temporary one keeps the relay from making its own. A
// temporary one may be a relay's that is making it.
func checkNewName(ctx context.Context, conn *pgconn.PgConn, slot string) error {
	name := NewSlotName(slot)
	s, err := readSlot(ctx, conn, name)
	switch {
	case errors.Is(err, ErrNoSlot), s != nil && s.temporary:
		return nil
	case s == nil:
		return err
	}
	return hint.Coded("slot-unfinished", hint.Errorf(dropHint(name),
		"slot %q: %w: a relay makes slot %q from a temporary one of that name", name, ErrForeignSlot, slot))
}

type serverFacts struct {
	version         int
	walLevel        string
	walLevelChanges bool // at the next restart
	inRecovery      bool
	mayReplicate    bool
	role            string
	slotExists      bool
	slots, maxSlots int
	maxSenders      int
	hash            int64
	encoding        string
}

const hashProbe = "walpost: the same on both sides?"

func readServer(ctx context.Context, conn *pgx.Conn, slot string) (f serverFacts, err error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	// effective_wal_level (19+) is what logical decoding goes by; wal_level is only asked for there.
	err = conn.QueryRow(ctx, `SELECT current_setting('server_version_num')::int,
		coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')),
		pg_is_in_recovery(),
		(SELECT rolsuper OR rolreplication FROM pg_roles WHERE rolname = current_user)
			OR EXISTS (SELECT FROM pg_roles r WHERE r.rolname IN ('rds_replication', 'rdsrepladmin')
				AND pg_has_role(current_user, r.oid, 'MEMBER')),
		current_user::text,
		EXISTS (SELECT FROM pg_replication_slots WHERE slot_name::text = $1::text),
		(SELECT count(*) FROM pg_replication_slots
			WHERE slot_name::text NOT IN ($1::text, $1::text || '_new'))::int,
		current_setting('max_replication_slots')::int,
		current_setting('max_wal_senders')::int,
		hashtextextended($2 COLLATE "C", 1),
		pg_encoding_to_char((SELECT encoding FROM pg_database WHERE datname = current_database())),
		coalesce((SELECT pending_restart FROM pg_settings WHERE name = 'wal_level'), false)`,
		slot, hashProbe).Scan(&f.version, &f.walLevel, &f.inRecovery, &f.mayReplicate, &f.role,
		&f.slotExists, &f.slots, &f.maxSlots, &f.maxSenders, &f.hash, &f.encoding, &f.walLevelChanges)
	if err != nil {
		return f, fmt.Errorf("read server settings: %w", err)
	}
	return f, nil
}

func (f serverFacts) problems(slot string) (p check.Findings) {
	p.If(f.version < 140000, "pg-version",
		hint.Errorf("upgrade: 14 is the oldest version that walpost reads",
			"PostgreSQL %d is too old", f.version/10000))
	p.If(f.inRecovery, "pg-standby",
		hint.Errorf("point postgres.url at the primary, "+
			"for example with target_session_attrs=read-write and several hosts",
			"the server is a standby"))
	p.If(f.encoding != "UTF8" && f.encoding != "SQL_ASCII", "pg-encoding",
		hint.Errorf("move the database to ENCODING 'UTF8'",
			"the database's encoding is %s, want UTF8: a row's content hash is taken over UTF-8", f.encoding))
	p.If(uint64(f.hash) != outbox.HashText([]byte(hashProbe), 1), "pg-hash",
		hint.Errorf("this server (big-endian?) cannot be read by walpost yet: please report it",
			"the server computes hashtextextended differently"))
	setWALLevel := "ALTER SYSTEM SET wal_level = logical, then restart the server; " +
		"without it mode: auto polls the table"
	if f.walLevelChanges {
		setWALLevel = "restart PostgreSQL: its configuration has another wal_level already; " +
			"until then mode: auto polls the table"
	}
	p.If(f.walLevel != "logical", "pg-wal-level",
		hint.Errorf(setWALLevel,
			"%w: wal_level is %q, streaming needs \"logical\"", ErrCannotStream, f.walLevel))
	p.If(!f.mayReplicate, "pg-role-replication",
		hint.Errorf(fmt.Sprintf("ALTER ROLE %s REPLICATION (RDS: GRANT rds_replication TO %[1]s); "+
			"without it mode: auto polls the table", outbox.QuoteIdent(f.role)),
			"%w: role %q may not replicate", ErrCannotStream, f.role))
	p.If(f.maxSenders == 0, "pg-max-wal-senders",
		hint.Errorf("raise max_wal_senders (needs a restart); without it mode: auto polls the table",
			"%w: max_wal_senders is 0", ErrCannotStream))
	p.If(!f.slotExists && f.slots+2 > f.maxSlots, "pg-no-free-slot",
		hint.Errorf("raise max_replication_slots (needs a restart) or drop a slot that nobody needs: "+
			"a relay takes one, and a second one while it makes it",
			"%w for %q: others have %d of %d", ErrNoFreeSlot, slot, f.slots, f.maxSlots))
	return p
}
