package setup

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// facts are what the server says. Pgx fills them in by their order.
type facts struct {
	User, Database, Version             string
	Number                              int // of the version
	Superuser, CreatesRoles, Replicates bool
	WALLevel                            string
	Standby                             bool
	Owner                               string
	OwnerExists, IsOwner                bool
	SchemaExists                        bool
	OwnerCreatesInDatabase              bool
	OwnerCreatesInSchema                bool
	RoleExists, RoleLogsIn              bool
	RoleReplicates                      bool
	AppExists                           bool
	// Found is the owner of the tables that are there, where nobody has named one and it is neither a relay's
	// role, the acting one, the database's owner nor a superuser: it may be anybody.
	Found string

	managed  *stream.Managed // nil where the server seems to be nobody's service
	fileSays bool            // wal_level is logical after the next restart
}

var factsSQL = `SELECT current_user::text, current_database()::text, current_setting('server_version'),
	current_setting('server_version_num')::int,
	me.rolsuper, me.rolsuper OR me.rolcreaterole, me.rolsuper OR me.rolreplication,
	coalesce(current_setting('effective_wal_level', true), current_setting('wal_level')), pg_is_in_recovery(),
	o.name, owner.oid IS NOT NULL, coalesce(` + pg.GivesToSQL("owner.oid") + `, false), n.oid IS NOT NULL,
	coalesce(has_database_privilege(owner.oid, d.oid, 'CREATE'), false),
	coalesce(has_schema_privilege(owner.oid, n.oid, 'CREATE'), false),
	relay.oid IS NOT NULL, coalesce(relay.rolcanlogin, false),
	coalesce(relay.rolsuper OR relay.rolreplication, false)
		OR EXISTS (SELECT FROM pg_roles r WHERE r.rolname = 'rds_replication'
			AND pg_has_role(relay.oid, r.oid, 'MEMBER')),
	EXISTS (SELECT FROM pg_roles WHERE rolname = $4),
	CASE WHEN $1 = '' AND o.name NOT IN ($2, current_user, pg_get_userbyid(d.datdba))
		AND NOT (owner.rolsuper OR owner.rolreplication) THEN o.name ELSE '' END
FROM pg_roles me
JOIN pg_database d ON d.datname = current_database()
LEFT JOIN pg_roles relay ON relay.rolname = $2
CROSS JOIN LATERAL (SELECT coalesce(nullif($1, ''),
	(SELECT pg_get_userbyid(c.relowner)::text FROM pg_class c WHERE c.oid = to_regclass($5)),
	(SELECT pg_get_userbyid(c.relowner)::text FROM pg_class c WHERE c.oid = to_regclass($6)),
	CASE WHEN me.rolsuper OR me.rolcreaterole OR pg_has_role(relay.oid, 'MEMBER') THEN $2 END,
	pg_get_userbyid(d.datdba)::text) AS name) o
LEFT JOIN pg_roles owner ON owner.rolname = o.name
LEFT JOIN pg_namespace n ON n.nspname = $3
WHERE me.rolname = current_user`

func (s *Setup) read(ctx context.Context) error {
	rows, _ := s.conn.Query(ctx, factsSQL, s.cfg.Owner, s.cfg.Role, s.schema(), s.cfg.App,
		s.cfg.Outboxes[0].SQL(), outbox.QuoteIdent(s.schema())+"."+table.DeadLetters)
	f, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[facts])
	if err != nil {
		return fmt.Errorf("read roles and settings: %w", err)
	}
	if f.managed, err = stream.ReadManaged(ctx, s.conn); err != nil {
		return err
	}
	if f.Superuser && f.WALLevel != "logical" {
		err := s.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_file_settings
			WHERE name = 'wal_level' AND setting = 'logical' AND seqno = (
				SELECT max(seqno) FROM pg_file_settings WHERE name = 'wal_level'))
			AND (SELECT pending_restart FROM pg_settings WHERE name = 'wal_level')`).Scan(&f.fileSays)
		if err != nil {
			return fmt.Errorf("read the server's settings file: %w", err)
		}
	}
	s.facts = f
	return s.refuse()
}

// refuse names what no step can put right.
func (s *Setup) refuse() error {
	f := s.facts
	switch {
	case f.Standby:
		return hint.Errorf("give the URL of the primary",
			"the server is a standby: nothing can be made there")
	case !f.CreatesRoles && !f.RoleExists:
		return hint.Errorf(
			"use a superuser, or a role with CREATEROLE; or have somebody run: "+createRole(s.cfg),
			"role %q does not exist, and %q may not create roles", s.cfg.Role, f.User)
	case !f.OwnerExists && !f.CreatesRoles:
		return hint.Errorf("give --owner a role that exists", "role %q does not exist", f.Owner)
	case f.OwnerExists && !f.IsOwner && !(s.relayOwns() && f.CreatesRoles):
		with := ""
		if f.Number >= 160000 {
			with = " WITH SET TRUE"
		}
		return hint.Errorf(fmt.Sprintf("GRANT %s TO %s%s, or choose another with --owner",
			outbox.QuoteIdent(f.Owner), outbox.QuoteIdent(f.User), with),
			"%q may not act as role %q, which is to own the tables", f.User, f.Owner)
	case s.cfg.App != "" && !f.AppExists:
		return hint.Errorf("create it first, or check the name behind --app",
			"role %q of the application does not exist", s.cfg.App)
	case f.Found != "":
		const advice = "--owner %s, if the tables are to be that role's; else drop what has their names"
		return hint.Errorf(fmt.Sprintf(advice, outbox.QuoteIdent(f.Found)),
			"%s, or one of walpost's tables, is there and belongs to role %q", s.cfg.Outboxes[0], f.Found)
	}
	return nil
}
