package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
)

// trapCalls are the arguments of each command that asks a server. Of the others none may be missing.
var trapCalls = map[string][]string{
	"consumers dlq discard": {"--consumer", "mailer"},
	"consumers dlq list":    {},
	"consumers dlq retry":   {"--consumer", "mailer"},
	"consumers dlq show":    {"1"},
	"consumers list":        {},
	"consumers rewind":      {"mailer", "--to", "1"},
	"dlq discard":           {"--all", "--yes"},
	"dlq give-up":           {"1", "--yes"},
	"dlq list":              {},
	"dlq retry":             {"--all"},
	"dlq show":              {"1"},
	"doctor":                {},
	"drill failover":        {"--yes", "--standby", "postgres://127.0.0.1:1/none", "--stop", "true"},
	"drill nats-restart":    {"--yes", "--restart", "true"},
	"drill relay-killed":    {"--yes", "--kill", "true"},
	"drill slot-lost":       {"--yes"},
	"init":                  {"--yes"},
	"migrate down":          {"--to", "0"},
	"migrate status":        {},
	"migrate up":            {"--notify-trigger", "--grant", "trap_relay"},
	"outbox forget":         {"public.outbox_messages"},
	"outbox keep":           {"public.outbox_messages"},
	"outbox list":           {},
	"outbox renew":          {"public.outbox_messages"},
	"outbox search":         {"public.outbox_messages"},
	"replay":                {"--all"},
	"replay cancel":         {"1"},
	"replay list":           {},
	"retention":             {},
	"run":                   {"--once"},
	"slot create":           {},
	"slot drop":             {},
	"slot show":             {},
	"status":                {},
	"tail":                  {"--since", "1h"},
	"ui":                    {"--listen", "127.0.0.1:0"},
	"verify":                {"--repair"},
}

// noServer are the commands that ask none, or make a database of their own.
var noServer = []string{
	"bench", "catalog check", "catalog diff", "catalog docs", "config check", "config example", "docs", "man", "migrate print", "version",
}

// trapsSQL makes the roles, and in schema model what walpost makes, for a stranger who may create objects in public. His function
// tells the server's log who calls it.
const trapsSQL = `
	CREATE SCHEMA lair AUTHORIZATION stranger; GRANT USAGE ON SCHEMA lair, model TO PUBLIC;
	GRANT ALL ON SCHEMA public TO trap_owner, stranger; GRANT CREATE ON DATABASE NAME TO trap_owner, stranger;
	GRANT SELECT ON ALL TABLES IN SCHEMA model TO stranger;
	CREATE FOREIGN DATA WRAPPER nowhere; CREATE SERVER nowhere FOREIGN DATA WRAPPER nowhere; GRANT USAGE ON FOREIGN SERVER nowhere TO stranger;
	SET ROLE stranger;
	CREATE FUNCTION lair.trap(what text) RETURNS boolean LANGUAGE plpgsql IMMUTABLE AS $$
		BEGIN RAISE LOG 'the trap of % has caught %', what, current_user; RETURN true; END $$;
	CREATE FUNCTION lair.fire() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM lair.trap('trigger ' || TG_TABLE_NAME); RETURN NEW; END $$;
	CREATE TABLE lair.t (id int); CREATE PUBLICATION walpost FOR TABLE lair.t; RESET ROLE;
	DO $$ DECLARE o record; BEGIN
		FOR o IN SELECT relname AS name, relkind FROM pg_class c WHERE relnamespace = 'model'::regnamespace AND relkind IN ('r', 'p', 'v', 'S')
			AND NOT EXISTS (SELECT FROM pg_class x WHERE x.relname = c.relname AND x.relnamespace = 'public'::regnamespace) LOOP
			EXECUTE CASE WHEN o.relkind = 'S' THEN replace('CREATE VIEW public.{name} AS SELECT 1 AS last_value WHERE lair.trap(''view {name}'')', '{name}', quote_ident(o.name))
				ELSE replace($trap$TRAP$trap$, '{name}', quote_ident(o.name)) END;
			EXECUTE format('ALTER %s public.%I OWNER TO stranger; GRANT ALL ON public.%2$I TO PUBLIC', CASE WHEN o.relkind = 'S' THEN 'VIEW' ELSE 'KIND' END, o.name);
		END LOOP;
		FOR o IN SELECT proname AS name, pg_get_function_arguments(oid) AS args, pg_get_function_result(oid) AS result, proargmodes IS NOT NULL OR prorettype = 'void'::regtype AS outs
			FROM pg_proc WHERE pronamespace = 'model'::regnamespace LOOP
			EXECUTE format('CREATE FUNCTION public.%I(%s) RETURNS %s LANGUAGE plpgsql AS %L', o.name, o.args, o.result,
				format('BEGIN PERFORM lair.trap(%L); RETURN %s; END', 'function ' || o.name, CASE WHEN NOT o.outs THEN 'NULL' END));
			EXECUTE format('ALTER FUNCTION public.%I OWNER TO stranger', o.name);
		END LOOP;
	END $$`

// trapKinds are what the stranger makes of each name, and its kind for ALTER.
var trapKinds = map[string][2]string{
	"view":          {"VIEW", `CREATE VIEW public.{name} AS SELECT m.* FROM model.{name} m WHERE lair.trap('view {name}')`},
	"foreign table": {"FOREIGN TABLE", `CREATE FOREIGN TABLE public.{name} (version bigint, outbox text) SERVER nowhere`},
	"table": {"TABLE", `CREATE TABLE public.{name} (LIKE model.{name});
		ALTER TABLE public.{name} ADD trap boolean DEFAULT lair.trap('default {name}') CHECK (lair.trap('check {name}')), ADD more boolean GENERATED ALWAYS AS (lair.trap('generated {name}')) STORED;
		CREATE INDEX ON public.{name} ((lair.trap('index {name}'))); CREATE INDEX ON public.{name} (trap) WHERE lair.trap('predicate {name}');
		CREATE STATISTICS public.{name}_s ON (lair.trap('statistics {name}')), trap FROM public.{name};
		CREATE RULE added AS ON INSERT TO public.{name} DO ALSO SELECT lair.trap('rule {name}');
		CREATE RULE gone AS ON DELETE TO public.{name} DO ALSO SELECT lair.trap('rule {name}');
		ALTER TABLE public.{name} ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;
		CREATE POLICY p ON public.{name} USING (lair.trap('policy {name}')) WITH CHECK (lair.trap('policy {name}'));
		CREATE TRIGGER a BEFORE INSERT OR UPDATE OR DELETE ON public.{name} FOR EACH ROW EXECUTE FUNCTION lair.fire();
		CREATE TRIGGER b AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON public.{name} FOR EACH STATEMENT EXECUTE FUNCTION lair.fire()`},
}

// TestTrapsByWalpostsNames: a stranger has made something by the name of each table, view, sequence, function and publication of
// walpost's, before walpost did. Whoever runs whatever command, none of his code runs, no row goes there, and what is in the
// way is said. The outbox is its owner's, or the stranger's, as the database is then: a superuser runs the commands.
func TestTrapsByWalpostsNames(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		nats := testenv.NewNATS(t, testenv.NATSOptions{})
		for _, role := range []string{"trap_owner LOGIN REPLICATION", "trap_relay LOGIN REPLICATION", "trap_app LOGIN", "stranger"} {
			if err := pg.Exec(t.Context(), "postgres", "CREATE ROLE "+role); err != nil {
				t.Fatal(err)
			}
		}
		for kind, made := range trapKinds {
			for _, outbox := range []string{"the owner's", "the stranger's"} {
				name := "trap_" + strings.ReplaceAll(kind, " ", "_") + map[string]string{"the stranger's": "_all"}[outbox]
				t.Run(kind+", the outbox is "+outbox, func(t *testing.T) { setTraps(t, pg, nats.URL(), name, made, outbox == "the owner's") })
			}
		}
	})
}

func setTraps(t *testing.T, pg *testenv.Postgres, nats, name string, made [2]string, ours bool) {
	url, err := pg.CreateDB(t.Context(), name)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(err)
	call := func(role string, args ...string) (code int, said string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
		if len(args) > 0 && slices.Contains([]string{"tail", "ui"}, args[0]) {
			cancel()
			ctx, cancel = context.WithTimeout(t.Context(), 2*time.Second)
		}
		defer cancel()
		t.Setenv("WALPOST_POSTGRES_URL", pg.URLFor(role, name))
		var out bytes.Buffer
		code = execute(ctx, args, &out, &out)
		return code, out.String()
	}
	t.Chdir(t.TempDir())
	t.Setenv("WALPOST_NATS_URL", nats)
	t.Setenv("WALPOST_HTTP_LISTEN", "")
	config := func(schema string) {
		must(os.WriteFile("walpost.yaml", fmt.Appendf(nil, `
postgres: {schema: %q}
nats: {stream: %s, subject: "%[2]s.{event_type}", create_stream: true}
retention: {delete_after: 1m}
outboxes: [{table: %[1]s.outbox_messages, layout: canonical}, {table: %[1]s.outbox_events, layout: append}]
`, schema, name), 0o600))
	}
	must(pg.Exec(t.Context(), name, "CREATE SCHEMA model"))
	config("model")
	if code, said := call("postgres", "migrate", "up", "--notify-trigger"); code != 0 {
		t.Fatal(said)
	}
	must(pg.Exec(t.Context(), name, "DROP PUBLICATION walpost"))
	if !ours {
		must(pg.Exec(t.Context(), name, `ALTER DATABASE `+name+` OWNER TO stranger`))
	} else {
		must(pg.Exec(t.Context(), name, `CREATE TABLE public.outbox_messages (LIKE model.outbox_messages INCLUDING ALL);
			ALTER TABLE public.outbox_messages OWNER TO trap_owner; GRANT ALL ON public.outbox_messages TO trap_relay, trap_app;
			INSERT INTO public.outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.placed', '{}'), ('order', 2, 'no subject', '{}')`))
	}
	must(pg.Exec(t.Context(), name, strings.NewReplacer("NAME", name, "KIND", made[0], "TRAP", made[1]).Replace(trapsSQL)))
	config("public")
	yaml, err := os.ReadFile("walpost.yaml")
	must(err)
	if ours {
		yaml = bytes.Replace(yaml, []byte(", {table: public.outbox_events, layout: append}"), nil, 1)
	}

	log := filepath.Join(filepath.Dir(pg.Dir()), "postgres.log")
	read := func() []byte {
		t.Helper()
		text, err := os.ReadFile(log)
		must(err)
		return text
	}
	roles := []string{"postgres"}
	if ours {
		roles = []string{"postgres", "trap_owner", "trap_relay", "trap_app"}
	}
	named := 0
	for _, cmd := range allCommands(newRootCommand()) {
		path := strings.Fields(cmd.CommandPath())[1:]
		args, asks := trapCalls[strings.Join(path, " ")]
		switch {
		case cmd.Flags().Lookup("config") == nil || slices.Contains(noServer, strings.Join(path, " ")):
			continue
		case !asks:
			t.Errorf("%s has no arguments here", cmd.CommandPath())
		}
		for _, role := range roles {
			must(os.WriteFile("walpost.yaml", yaml, 0o600))
			if path[0] == "init" {
				must(os.Remove("walpost.yaml"))
				args = []string{"--yes", "--postgres-url", pg.URLFor(role, name), "--nats-url", nats, "--publication", name, "--slot", name, "--stream", name + "_init", "--subject", name + "_init.{event_type}"}
			}
			before := len(read())
			code, said := call(role, append(slices.Clone(path), args...)...)
			for line := range strings.Lines(string(read()[before:])) {
				if strings.Contains(line, "the trap of ") && !strings.Contains(line, "has caught stranger") {
					t.Errorf("%s as %s: %s%s", cmd.CommandPath(), role, line, said)
				}
			}
			if code != 0 && !strings.Contains(said, "hint: ") && !strings.Contains(said, "fix: ") {
				t.Errorf("%s as %s ended with %d and no hint: %s", cmd.CommandPath(), role, code, said)
			}
			if strings.Contains(said, "stranger") || strings.Contains(said, "not a table") {
				named++
			}
			t.Logf("%s as %s: %d: %s", cmd.CommandPath(), role, code, said)
		}
	}
	if named < 15*len(roles) {
		t.Errorf("%d commands have named the stranger, or what is no table", named)
	}
	conn, err := pgx.Connect(t.Context(), url)
	must(err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	if made[0] == "TABLE" {
		var rows int
		must(conn.QueryRow(t.Context(), `SELECT sum((xpath('/row/n/text()', query_to_xml(format('SELECT count(*) AS n FROM %s', oid::regclass), false, true, '')))[1]::text::int)
			FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r' AND relowner = 'stranger'::regrole`).Scan(&rows))
		if rows > 0 {
			t.Errorf("%d rows went to the stranger", rows)
		}
	}
}

// TestTrapsOnASuperusersTables: the outbox and the schema are the superuser's, and a stranger may make triggers or tables there. None of
// his code runs as the superuser.
func TestTrapsOnASuperusersTables(t *testing.T) {
	pg, nats := testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{})
	url := pg.NewDB(t)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	name := conn.Config().Database
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), strings.ReplaceAll(sql, "{of}", name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(t.TempDir())
	t.Setenv("WALPOST_HTTP_LISTEN", "")
	t.Setenv("WALPOST_POSTGRES_URL", url)
	t.Setenv("WALPOST_NATS_URL", nats.URL())
	t.Setenv("WALPOST_STREAM", name)
	t.Setenv("WALPOST_SUBJECT", name+".{event_type}")
	call := func(args ...string) (said string) {
		t.Helper()
		var out bytes.Buffer
		if execute(t.Context(), args, &out, &out) == 0 {
			t.Errorf("%q ended well: %s", args, &out)
		}
		return out.String()
	}
	exec(`CREATE ROLE thief_{of}; GRANT CREATE, USAGE ON SCHEMA public TO thief_{of}`)
	for _, args := range [][]string{{"status"}, {"doctor"}, {"run", "--once"}} {
		if said := call(args...); !strings.Contains(said, `the right to make table public.outbox_messages, which is missing, belongs to role "thief_`) {
			t.Errorf("%q says %s", args, said)
		}
	}
	exec(`CREATE TABLE caught (who text); GRANT ALL ON caught TO PUBLIC`)
	var out bytes.Buffer
	if execute(t.Context(), []string{"migrate", "up", "--only", "relay"}, &out, &out) != 0 {
		t.Fatal(&out)
	}
	// What another role can do to a table, or has done, so that a superuser's statement would run his code.
	exec(`CREATE FUNCTION mine() RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'; ALTER FUNCTION mine() OWNER TO thief_{of}`)
	for _, c := range []struct{ make, undo, want string }{
		{`GRANT TRIGGER ON outbox_messages TO thief_{of}`, `REVOKE ALL ON outbox_messages FROM thief_{of}`, `the right TRIGGER on public.outbox_messages belongs to role "thief_`},
		{`GRANT REFERENCES ON outbox_messages_archive TO thief_{of}`, `REVOKE ALL ON outbox_messages_archive FROM thief_{of}`, `the right REFERENCES on public.outbox_messages_archive belongs to role "thief_`},
		{`GRANT REFERENCES (id) ON outbox_messages TO thief_{of}`, `REVOKE ALL (id) ON outbox_messages FROM thief_{of}`, `the right REFERENCES on public.outbox_messages belongs to role "thief_`},
		{
			`GRANT REFERENCES ON outbox_messages TO thief_{of}; SET ROLE thief_{of}; CREATE TABLE child (id bigint REFERENCES outbox_messages ON DELETE CASCADE); RESET ROLE; REVOKE ALL ON outbox_messages FROM thief_{of}`,
			`DROP TABLE child`, `table public.child belongs to role "thief_`,
		},
		{`ALTER TABLE outbox_messages_archive_default OWNER TO thief_{of}`, `ALTER TABLE outbox_messages_archive_default OWNER TO CURRENT_USER; GRANT ALL ON outbox_messages_archive_default TO CURRENT_USER`, `table public.outbox_messages_archive_default belongs to role "thief_`},
		{`ALTER TABLE outbox_messages ADD CONSTRAINT his CHECK (mine())`, `ALTER TABLE outbox_messages DROP CONSTRAINT his`, `function public.mine() belongs to role "thief_`},
		{`ALTER TABLE outbox_sent ALTER shard SET DEFAULT mine()::text`, `ALTER TABLE outbox_sent ALTER shard DROP DEFAULT`, `function public.mine() belongs to role "thief_`},
		{`CREATE INDEX his ON outbox_messages ((mine()))`, `DROP INDEX his`, `function public.mine() belongs to role "thief_`},
		{`CREATE DOMAIN his AS text; ALTER DOMAIN his OWNER TO thief_{of}; ALTER TABLE outbox_messages ADD x his`, `ALTER TABLE outbox_messages DROP x; DROP DOMAIN his`, `type public.his belongs to role "thief_`},
		{
			`CREATE TABLE audit (id bigint REFERENCES outbox_messages ON DELETE CASCADE); GRANT TRIGGER ON audit TO thief_{of}`,
			`DROP TABLE audit`, `the right TRIGGER on public.audit belongs to role "thief_`,
		},
		{
			`CREATE TABLE tenants (id text PRIMARY KEY); ALTER TABLE tenants OWNER TO thief_{of}; ALTER TABLE outbox_messages ADD x text REFERENCES tenants`,
			`ALTER TABLE outbox_messages DROP x; DROP TABLE tenants`, `table public.tenants belongs to role "thief_`,
		},
		{
			`CREATE DOMAIN base AS text; CREATE DOMAIN ours AS base; ALTER DOMAIN base OWNER TO thief_{of}; ALTER TABLE outbox_messages ADD x ours`,
			`ALTER TABLE outbox_messages DROP x; DROP DOMAIN base CASCADE`, `type public.base belongs to role "thief_`,
		},
		{
			`CREATE DOMAIN base AS text; CREATE TYPE pair AS (a base); ALTER DOMAIN base OWNER TO thief_{of}; ALTER TABLE outbox_messages ADD x pair`,
			`ALTER TABLE outbox_messages DROP x; DROP TYPE pair; DROP DOMAIN base`, `type public.base belongs to role "thief_`,
		},
		{
			`CREATE DOMAIN ours AS text CHECK (mine()); ALTER TABLE outbox_messages ADD x ours`,
			`ALTER TABLE outbox_messages DROP x; DROP DOMAIN ours`, `function public.mine() belongs to role "thief_`,
		},
		{
			`CREATE FUNCTION ours() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; CREATE TRIGGER ours BEFORE INSERT ON outbox_messages FOR EACH ROW WHEN (mine()) EXECUTE FUNCTION ours()`,
			`DROP TRIGGER ours ON outbox_messages; DROP FUNCTION ours()`, `function public.mine() belongs to role "thief_`,
		},
		{`ALTER DATABASE {of} OWNER TO thief_{of}`, `ALTER DATABASE {of} OWNER TO CURRENT_USER`, `belongs to role "thief_`},
		{`CREATE ROLE boss_{of} SUPERUSER; ALTER TABLE outbox_messages OWNER TO thief_{of}; SET ROLE boss_{of}`, `RESET ROLE; ALTER TABLE outbox_messages OWNER TO CURRENT_USER`, `table public.outbox_messages belongs to role "thief_`},
	} {
		exec(c.make)
		for _, args := range [][]string{{"dlq", "list"}, {"doctor"}, {"run", "--once"}} {
			if said := call(args...); !strings.Contains(said, c.want) {
				t.Errorf("%s: %q says %s", c.make, args, said)
			}
		}
		exec(c.undo)
	}
	exec(`GRANT ALL ON outbox_messages, outbox_sent TO thief_{of}; SET ROLE thief_{of};
		CREATE FUNCTION spy() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO caught VALUES (current_user); RETURN NEW; END'; RESET ROLE`)
	for _, table := range []string{"outbox_messages", "outbox_sent"} {
		exec(`SET ROLE thief_{of}; CREATE TRIGGER spy BEFORE INSERT OR UPDATE ON ` + table + ` FOR EACH ROW EXECUTE FUNCTION spy(); RESET ROLE`)
		commands := [][]string{{"run", "--once"}, {"outbox", "keep", "public.outbox_messages"}, {"migrate", "up", "--notify-trigger"}}
		if table == "outbox_sent" {
			commands = commands[:2] // the last one does nothing with it
		}
		for _, args := range commands {
			if said := call(args...); !strings.Contains(said, "function public.spy() belongs to role") {
				t.Errorf("%q says %s", args, said)
			}
		}
		exec(`DROP TRIGGER spy ON ` + table)
	}
	// To plan a statement on a table runs the expressions of its indexes. The doctor looks for outboxes that nobody reads.
	exec(`SET ROLE thief_{of};
		CREATE FUNCTION catch() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN INSERT INTO public.caught VALUES (current_user); RETURN true; END';
		CREATE FUNCTION his() RETURNS boolean IMMUTABLE LANGUAGE plpgsql AS 'BEGIN RETURN public.catch(); END';
		CREATE TABLE outbox_events (id bigint, trace_id text); CREATE INDEX ON outbox_events ((his())); GRANT SELECT ON outbox_events TO PUBLIC; RESET ROLE;
		REVOKE ALL ON outbox_messages, outbox_sent FROM thief_{of}; DELETE FROM caught`)
	execute(t.Context(), []string{"doctor"}, &out, &out)
	exec(`DROP TABLE outbox_events`)
	// A superuser's session that begins as another role by a setting of the database's owner.
	exec(`ALTER DATABASE {of} SET role = 'thief_{of}'`)
	for _, args := range [][]string{{"init", "--print"}, {"doctor"}, {"migrate", "status"}, {"run", "--once"}} {
		if said := call(args...); !strings.Contains(said, "begins as another role") {
			t.Errorf("%q says %s", args, said)
		}
	}
	exec(`ALTER DATABASE {of} RESET role`)
	// Somebody else's record of what is applied neither tells the owner, nor is it read.
	exec(`DROP TABLE IF EXISTS walpost_migrations_idempotency; SET ROLE thief_{of};
		CREATE TABLE walpost_migrations_idempotency (version bigint PRIMARY KEY, hash text NOT NULL, applied_at timestamptz NOT NULL DEFAULT now()); RESET ROLE`)
	if said := call("migrate", "up"); !strings.Contains(said, `"public"."walpost_migrations_idempotency" belongs to role "thief_`) {
		t.Errorf("migrate up says %s", said)
	}
	var n int
	if err := conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM caught) + (SELECT count(*) FROM pg_class WHERE relname LIKE 'outbox%' AND pg_get_userbyid(relowner) LIKE 'thief%')`).Scan(&n); err != nil || n > 0 {
		t.Errorf("%d times his code ran, or tables are his; %v", n, err)
	}
}

// TestMayCreateRoles: the first role of a managed service, which owns its database and may make roles, can do everything with it. Up to
// PostgreSQL 15 such a role may have itself made what a superuser is.
func TestMayCreateRoles(t *testing.T) {
	pg, nats := testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{})
	url := pg.NewDB(t)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background()) //nolint:errcheck // the test is over
	name := conn.Config().Database
	master := "master_" + name
	for _, sql := range []string{`CREATE ROLE ` + master + ` LOGIN CREATEROLE REPLICATION`, `ALTER DATABASE ` + name + ` OWNER TO ` + master} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(t.TempDir())
	t.Setenv("WALPOST_HTTP_LISTEN", "")
	t.Setenv("WALPOST_POSTGRES_URL", strings.Replace(url, "postgres@", master+"@", 1))
	t.Setenv("WALPOST_NATS_URL", nats.URL())
	t.Setenv("WALPOST_STREAM", name)
	t.Setenv("WALPOST_SUBJECT", name+".{event_type}")
	t.Setenv("WALPOST_CREATE_STREAM", "true")
	for _, args := range [][]string{{"migrate", "up"}, {"migrate", "status"}, {"run", "--once"}, {"status"}, {"dlq", "list"}, {"verify"}, {"retention"}} {
		var out bytes.Buffer
		if execute(t.Context(), args, &out, &out) != 0 && strings.Contains(out.String(), "superuser") {
			t.Errorf("%q says %s", args, &out)
		}
	}
}
