package badinput

import (
	"fmt"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// ownersSQL prepares a database whose tables are one role's.
const ownersSQL = `
	CREATE ROLE NAME_owner LOGIN REPLICATION; CREATE ROLE NAME_relay LOGIN REPLICATION; CREATE ROLE NAME_reader;
	GRANT CREATE ON DATABASE NAME TO NAME_owner;
	REVOKE ALL ON SCHEMA public FROM PUBLIC; ALTER SCHEMA public OWNER TO NAME_owner; GRANT USAGE ON SCHEMA public TO NAME_relay`

// readableSQL gives the reader each table that there is.
const readableSQL = `DO $$ DECLARE name text; BEGIN
	FOR name IN SELECT oid::regclass FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') LOOP
		EXECUTE format('GRANT SELECT ON %s TO NAME_reader', name); END LOOP; END $$`

// TestOwnersAfterEveryCommand: whoever runs a command, what it makes belongs to the tables' owner, and a partition is as its
// siblings are: the owner goes on with it, and who may read the others may read it.
func TestOwnersAfterEveryCommand(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	for layout, insert := range map[string]string{
		"canonical": `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at)
			SELECT 'order', n + (random() * 1e9)::int, CASE WHEN n % 10 = 0 THEN 'no subject' ELSE 'order.placed' END, '{}', now() - n * interval '10 days' FROM generate_series(1, 30) n`,
		"append": `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', n + (random() * 1e9)::int, CASE WHEN n % 10 = 0 THEN 'no subject' ELSE 'order.placed' END, '{}' FROM generate_series(1, 30) n`,
	} {
		t.Run(layout, func(t *testing.T) {
			t.Parallel()
			s := *s
			s.t = t
			name := "owners_" + layout
			s.must(s.pg.Exec(t.Context(), "postgres", "CREATE DATABASE "+name+" TEMPLATE template0"))
			s.must(s.pg.Exec(t.Context(), name, strings.ReplaceAll(ownersSQL, "NAME", name)))
			owner, relay := name+"_owner", name+"_relay"
			as := func(role string, args ...string) {
				t.Helper()
				c := badStart{name: name, sql: ownersSQL, user: role, env: map[string]string{
					"WALPOST_LAYOUT": layout, "WALPOST_FALLBACK_MAX_ATTEMPTS": "2", "WALPOST_FALLBACK_BACKOFF": "1h",
					"WALPOST_RETENTION_DELETE_AFTER": "1m", "WALPOST_OWNER": owner, // as a superuser, nothing is done with tables of a role that is not named
				}}
				cmd := exec.CommandContext(t.Context(), s.program, args...)
				cmd.Dir, cmd.Env = t.TempDir(), c.environment(&s)
				out, err := cmd.CombinedOutput()
				command := strings.Join(args, " ") + " as " + role
				if err != nil && role != relay {
					t.Errorf("%s: %v\n%s", command, err, out)
				}
				s.ownersAreRight(name, command)
			}
			as(owner, "migrate", "up", "--only", "relay", "--grant", relay)
			s.must(s.pg.Exec(t.Context(), name, strings.ReplaceAll(readableSQL, "NAME", name)))
			up := []string{"migrate", "up"}
			if layout == "canonical" {
				up = append(up, "--partition", "month")
			}
			table := "public." + map[string]string{"canonical": outbox.DefaultTable, "append": outbox.AppendTable}[layout]
			for round, role := range []string{"postgres", relay, owner} {
				s.must(s.pg.Exec(t.Context(), name, insert))
				for _, args := range [][]string{
					up,
					{"migrate", "up", "--notify-trigger"},
					{"migrate", "status"},
					{"slot", "create"},
					{"run", "--once"},
					{"dlq", "give-up", "--yes", fmt.Sprint(30*round + 10)},
					{"run", "--once"},
					{"dlq", "retry", "--all"},
					{"retention"},
					{"outbox", "keep", table},
					{"verify", "--repair"},
					{"replay", "--all"},
					{"run", "--once"},
					{"status"},
					{"doctor"},
					{"outbox", "renew", table},
					{"slot", "drop"},
				} {
					as(role, args...)
				}
				if layout == "append" {
					as(role, "outbox", "search", table)
				}
			}
			as(owner, "migrate", "down", "--only", "idempotency", "--to", "0")
			s.must(s.pg.Exec(t.Context(), name, "DROP PUBLICATION walpost"))
			as("postgres", "migrate", "up")
		})
	}
}

// TestSquatterGetsNoTables: somebody who may create tables has made the one that says what is applied. A superuser's tables stay the
// superuser's.
func TestSquatterGetsNoTables(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	const name = "squatted"
	s.must(s.pg.Exec(t.Context(), "postgres", "CREATE DATABASE "+name+" TEMPLATE template0"))
	s.must(s.pg.Exec(t.Context(), name, `CREATE ROLE squatter LOGIN; GRANT CREATE ON SCHEMA public TO squatter, PUBLIC; SET ROLE squatter;
		CREATE TABLE walpost_migrations_idempotency (version bigint PRIMARY KEY, hash text, applied_at timestamptz DEFAULT now())`))
	c := badStart{name: name, sql: leastSQL}
	cmd := exec.CommandContext(t.Context(), s.program, "migrate", "up", "--only", "consumer")
	cmd.Dir, cmd.Env = t.TempDir(), c.environment(s)
	out, err := cmd.CombinedOutput()
	t.Logf("%v: %s", err, out)
	s.connected(name, func(conn *pgx.Conn) {
		var squatted int
		s.must(conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relowner = 'squatter'::regrole`).Scan(&squatted))
		if squatted != 1 || err != nil {
			t.Errorf("the squatter owns %d tables, want 1; %v", squatted, err)
		}
	})
}

// ownersAreRight compares what is in the schema with its owner, and partitions with each other. The function of --notify-trigger is
// a superuser's if one has made it: the triggers of every owner's outboxes share it.
func (s *site) ownersAreRight(database, after string) {
	s.t.Helper()
	s.connected(database, func(conn *pgx.Conn) {
		rows, err := conn.Query(s.t.Context(), `
			SELECT format('%s belongs to %s', oid::regclass, pg_get_userbyid(relowner)) FROM pg_class
			WHERE relnamespace = 'public'::regnamespace AND pg_get_userbyid(relowner) <> $1 AND relkind NOT IN ('i', 'I', 't')
			UNION ALL SELECT format('%s belongs to %s', oid::regprocedure, pg_get_userbyid(proowner)) FROM pg_proc
			WHERE pronamespace = 'public'::regnamespace AND pg_get_userbyid(proowner) <> $1 AND proname <> 'walpost_notify'
			UNION ALL SELECT format('publication %s belongs to %s', pubname, pg_get_userbyid(pubowner)) FROM pg_publication
			WHERE pg_get_userbyid(pubowner) <> $1
			UNION ALL SELECT format('%s have %s', inhparent::regclass, string_agg(DISTINCT what, ', ')) FROM (
				SELECT inhparent, concat_ws(' ', pg_get_userbyid(relowner), relreplident, reltablespace,
					ARRAY(SELECT format('%s %s', grantee::regrole, privilege_type) FROM aclexplode(relacl) ORDER BY 1),
					(SELECT string_agg(concat(tgname, tgenabled), ' ' ORDER BY tgname) FROM pg_trigger g WHERE tgrelid = c.oid AND tgname LIKE 'outbox%')) AS what
				FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE c.relkind = 'r') x
			GROUP BY inhparent HAVING count(DISTINCT what) > 1`, database+"_owner")
		s.must(err)
		wrong, err := pgx.CollectRows(rows, pgx.RowTo[string])
		s.must(err)
		for _, w := range wrong {
			s.t.Errorf("after %s: %s", after, w)
		}
	})
}
