package badinput

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats-server/v2/server"
)

// snapshot is what both servers hold, a line for each thing.
func (s *site) snapshot() []string {
	s.t.Helper()
	return append(s.broker(), s.databases()...)
}

// broker lists the streams of every account with their configuration, messages
// and consumers, and what the accounts use.
func (s *site) broker() (lines []string) {
	s.t.Helper()
	info, err := s.nats.Server().Jsz(&server.JSzOptions{Accounts: true, Streams: true, Consumer: true, Config: true, Limit: 1000})
	s.must(err)
	for _, account := range info.AccountDetails {
		lines = append(lines, fmt.Sprintf("account %s: memory %d, store %d, streams %d",
			account.Name, account.Memory, account.Store, len(account.Streams)))
		for _, stream := range account.Streams {
			stream.Mirror, stream.Sources = nil, nil // how far behind they are, and since when
			text, err := json.Marshal(stream)
			s.must(err)
			lines = append(lines, fmt.Sprintf("stream %s/%s: %s", account.Name, stream.Name, text))
		}
	}
	return lines
}

// clusterSQL lists what belongs to the whole server. The LSNs of a standby's
// slot move by themselves.
const clusterSQL = `
	SELECT 'slot', slot_name::text, concat_ws(' ', plugin, slot_type, database, temporary, wal_status,
		CASE slot_type WHEN 'logical' THEN concat_ws(' ', active, restart_lsn, confirmed_flush_lsn) END) FROM pg_replication_slots
	UNION ALL SELECT 'role', rolname::text, to_jsonb(r) #>> '{}' FROM pg_roles r
	UNION ALL SELECT 'membership', roleid::regrole::text, member::regrole::text FROM pg_auth_members
	UNION ALL SELECT 'database', datname::text, concat_ws(' ', pg_get_userbyid(datdba), datacl::text) FROM pg_database
	UNION ALL SELECT 'role setting', concat_ws(' ', setrole, setdatabase), setconfig::text FROM pg_db_role_setting
	UNION ALL SELECT 'setting', name, concat_ws(' ', setting, sourcefile) FROM pg_settings WHERE source LIKE 'configuration file'`

// databaseSQL lists what belongs to one database. xmin tells of rows that were
// written again with the same content.
const databaseSQL = `
	SELECT 'publication', pubname::text, (to_jsonb(p) || jsonb_build_object('xmin', p.xmin::text)) #>> '{}' FROM pg_publication p
	UNION ALL SELECT 'publication table', prpubid::text, to_jsonb(r) #>> '{}' FROM pg_publication_rel r
	UNION ALL SELECT 'schema', nspname::text, concat_ws(' ', pg_get_userbyid(nspowner), nspacl::text) FROM pg_namespace
	UNION ALL SELECT 'relation', c.oid::regclass::text, concat_ws(' ', relkind, relpersistence, pg_get_userbyid(relowner), relacl::text,
		reloptions::text, relrowsecurity, relreplident, (SELECT string_agg(concat_ws(' ', attname, atttypid::regtype, attacl::text), ', ' ORDER BY attnum)
			FROM pg_attribute WHERE attrelid = c.oid AND NOT attisdropped))
		FROM pg_class c WHERE relnamespace = ANY(SELECT oid FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema')
	UNION ALL SELECT 'function', p.oid::regprocedure::text, proacl::text FROM pg_proc p
		WHERE pronamespace = ANY(SELECT oid FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema')
	UNION ALL SELECT 'trigger', tgname::text, tgrelid::regclass::text FROM pg_trigger
	UNION ALL SELECT 'extension', extname::text, extversion FROM pg_extension`

// rowsSQL reads every row of a table, with the transaction that wrote it.
const rowsSQL = `SELECT 'row', %s, concat_ws(' ', t.xmin, t.ctid, t) FROM %s t`

// databases lists a whole cluster.
func (s *site) databases() (lines []string) {
	s.t.Helper()
	var all []string
	s.connected("postgres", func(conn *pgx.Conn) {
		lines = s.read(conn, clusterSQL)
		rows, _ := conn.Query(s.t.Context(), `SELECT datname::text FROM pg_database WHERE datallowconn`)
		var err error
		all, err = pgx.CollectRows(rows, pgx.RowTo[string])
		s.must(err)
	})
	for _, name := range all {
		s.connected(name, func(conn *pgx.Conn) {
			for _, line := range append(s.read(conn, databaseSQL), s.rows(conn)...) {
				lines = append(lines, "database "+name+": "+line)
			}
		})
	}
	return lines
}

// rows lists every row of every table.
func (s *site) rows(conn *pgx.Conn) (lines []string) {
	s.t.Helper()
	result, _ := conn.Query(s.t.Context(), `SELECT c.oid::regclass::text FROM pg_class c
		WHERE relkind = 'r' AND relnamespace = ANY(SELECT oid FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema')`)
	tables, err := pgx.CollectRows(result, pgx.RowTo[string])
	s.must(err)
	for _, table := range tables {
		lines = append(lines, s.read(conn, fmt.Sprintf(rowsSQL, "'"+strings.ReplaceAll(table, "'", "''")+"'", table))...)
	}
	return lines
}

func (s *site) connected(database string, do func(*pgx.Conn)) {
	s.t.Helper()
	conn, err := pgx.Connect(s.t.Context(), s.pg.URL(database))
	s.must(err)
	defer conn.Close(context.WithoutCancel(s.t.Context()))
	do(conn)
}

func (s *site) read(conn *pgx.Conn, sql string) []string {
	s.t.Helper()
	rows, _ := conn.Query(s.t.Context(), sql) // its error comes again from the rows
	lines, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
		var kind, name, what *string
		err := row.Scan(&kind, &name, &what)
		return fmt.Sprintf("%s %s %s", deref(kind), deref(name), deref(what)), err
	})
	s.must(err)
	return lines
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// compare reports every line that is in one snapshot only.
func compare(t *testing.T, before, after []string) {
	t.Helper()
	if len(before) < 100 {
		t.Fatalf("the snapshot has only %d lines", len(before))
	}
	slices.Sort(before)
	slices.Sort(after)
	for _, line := range before {
		if _, found := slices.BinarySearch(after, line); !found {
			t.Errorf("gone:  %s", line)
		}
	}
	for _, line := range after {
		if _, found := slices.BinarySearch(before, line); !found {
			t.Errorf("new:   %s", line)
		}
	}
}
