package setup

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

var update = flag.Bool("update", false, "write the golden files")

func TestMain(m *testing.M) { testenv.Main(m) }

// site is a database without anything, and what is to be set up in it.
type site struct {
	t    *testing.T
	pg   *testenv.Postgres
	name string // of the database
	cfg  Config
}

func newSite(t *testing.T, pg *testenv.Postgres, name string) *site {
	t.Helper()
	url, err := pg.CreateDB(t.Context(), name)
	s := &site{t: t, pg: pg, name: name, cfg: config(t, url)}
	s.must(err)
	return s
}

func config(t *testing.T, url string) Config {
	return Config{
		Admin: pg.Config{URL: url}, Role: "walpost", Publication: "walpost",
		Outboxes: []*outbox.Table{{
			Schema: "public", Name: "outbox_events", Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal,
		}},
		PasswordFile: filepath.Join(t.TempDir(), "walpost.password"),
	}
}

func (s *site) must(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatalf("%v (hint: %s)", err, hint.Of(err))
	}
}

func (s *site) exec(sql string) {
	s.t.Helper()
	s.must(s.pg.Exec(s.t.Context(), s.name, sql))
}

// plan is the plan of a set-up that begins now. do does the first steps of it, or all with -1.
func (s *site) plan(do int) []*Step {
	s.t.Helper()
	x, err := Open(s.t.Context(), s.cfg)
	s.must(err)
	defer x.Close()
	steps, err := x.Plan(s.t.Context())
	s.must(err)
	if do < 0 {
		do = len(steps)
	}
	s.must(x.Do(s.t.Context(), steps[:do], func(int) {}))
	return steps
}

// fails is the error of a plan.
func (s *site) fails(text string) {
	s.t.Helper()
	x, err := Open(s.t.Context(), s.cfg)
	if err == nil {
		_, err = x.Plan(s.t.Context())
		x.Close()
	}
	if err == nil || !strings.Contains(err.Error(), text) || hint.Of(err) == "" {
		s.t.Errorf("the plan ended with %v (hint: %s), want %q", err, hint.Of(err), text)
	}
}

// complete fails where a step is not done.
func (s *site) complete() {
	s.t.Helper()
	for _, step := range s.plan(0) {
		if !step.Done {
			s.t.Errorf("not done: %s %q", step.Why, step.SQL)
		}
	}
}

// golden compares a plan with a file.
func (s *site) golden(file string, steps []*Step) {
	s.t.Helper()
	var b strings.Builder
	for _, step := range steps {
		fmt.Fprintf(&b, "%s done=%t by-hand=%t\n", step.Why, step.Done, step.ByHand)
		for _, sql := range step.SQL {
			fmt.Fprintf(&b, "\t%s\n", strings.ReplaceAll(sql, s.cfg.PasswordFile, "FILE"))
		}
	}
	path := filepath.Join("testdata", file)
	if *update {
		s.must(os.WriteFile(path, []byte(b.String()), 0o644))
	}
	want, err := os.ReadFile(path)
	s.must(err)
	if b.String() != string(want) {
		s.t.Errorf("the plan is\n%s\nwant\n%s", b.String(), want)
	}
}

// as connects with the relay's URL and password.
func (s *site) as(role string) (*pgx.Conn, error) {
	s.t.Helper()
	url, err := RelayURL(s.cfg.Admin, role, s.name)
	s.must(err)
	conn, err := pg.Connect(s.t.Context(), pg.Config{URL: url, Files: pg.Files{Password: s.cfg.PasswordFile}})
	if err == nil {
		s.t.Cleanup(func() { _ = conn.Close(context.Background()) })
	}
	return conn, err
}

// asks has the server ask a role for its password.
func (s *site) asks(role string) {
	s.t.Helper()
	path := filepath.Join(s.pg.Dir(), "pg_hba.conf")
	hba, err := os.ReadFile(path)
	s.must(err)
	line := fmt.Sprintf("host all %q 127.0.0.1/32 scram-sha-256\n", role)
	s.must(os.WriteFile(path, append([]byte(line), hba...), 0o600))
	s.exec(`SELECT pg_reload_conf()`)
}

// TestFreshCluster: from nothing to a relay's database, also where wal_level has to change.
func TestFreshCluster(t *testing.T) {
	t.Parallel()
	replica := testenv.PGOptions{Settings: map[string]string{"wal_level": "replica", "log_statement": "all"}}
	testenv.ClustersWith(t, replica, func(t *testing.T, pg *testenv.Postgres) {
		s := newSite(t, pg, "shop")
		s.exec(`CREATE ROLE shop`)
		s.cfg.App = "shop"
		s.golden("fresh.golden", s.plan(-1))
		info, err := os.Stat(s.cfg.PasswordFile)
		s.must(err)
		if info.Mode().Perm() != 0o600 {
			t.Errorf("the password file has mode %s", info.Mode())
		}
		log, err := os.ReadFile(filepath.Join(filepath.Dir(pg.Dir()), "postgres.log"))
		s.must(err)
		password, err := os.ReadFile(s.cfg.PasswordFile)
		s.must(err)
		if !strings.Contains(string(log), "SCRAM-SHA-256$") || strings.Contains(string(log), strings.TrimSpace(string(password))) {
			t.Error("the server's log has the password, or no verifier")
		}
		s.golden("again.golden", s.plan(-1))
		s.must(pg.Restart(t.Context()))
		s.asks("walpost")
		s.complete()
		conn, err := s.as("walpost")
		s.must(err)
		_, err = conn.Exec(t.Context(), `SELECT FROM public.outbox_events`)
		s.must(err)
		// What the relay's role does beside delivering: retention, and putting dead letters back or discarding them.
		_, err = conn.Exec(t.Context(), `ALTER TABLE public.outbox_events ALTER payload SET STATISTICS -1;
			INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'order.placed', '{}');
			DELETE FROM public.outbox_messages_dlq; DELETE FROM public.outbox_messages_archive_default`)
		s.must(err)
		s.exec(`SET ROLE shop; INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', '1', 'order.placed', '{}') RETURNING id`)
	})
}

// TestPoll needs neither wal_level, REPLICATION nor a publication.
func TestPoll(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{Settings: map[string]string{"wal_level": "replica"}}), "shop")
	s.cfg.Poll = true
	s.golden("poll.golden", s.plan(-1))
	s.complete()
}

// TestStrangeNames are those with quotes, spaces and statements in them.
func TestStrangeNames(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}), `we"ird 'shop`)
	s.cfg.Role, s.cfg.Owner, s.cfg.App = `r'o"le; DROP TABLE x; --`, `o'w"ner \x`, `Ünï app`
	s.cfg.Outboxes[0].Schema, s.cfg.Publication = `app "s`, `pub"li'c`
	s.exec(`CREATE ROLE "Ünï app"`)
	s.golden("strange.golden", s.plan(-1))
	s.complete()
	s.asks(s.cfg.Role)
	_, err := s.as(s.cfg.Role)
	s.must(err)
}

// TestOwner: tables that are there keep their owner, and where the relay's role cannot be the owner, the
// database's is.
func TestOwner(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}), "shop")
	owner := func(want string) {
		t.Helper()
		x, err := Open(t.Context(), s.cfg)
		s.must(err)
		defer x.Close()
		if x.Owner() != want {
			t.Errorf("the tables are %q's, want %q's", x.Owner(), want)
		}
	}
	owner("") // the relay's role, which the set-up makes
	s.exec(`CREATE ROLE walpost LOGIN REPLICATION; CREATE ROLE dba LOGIN; ALTER DATABASE shop OWNER TO dba`)
	admin := s.cfg.Admin.URL
	s.cfg.Admin.URL = s.pg.URLFor("dba", "shop")
	owner("dba")
	s.exec(`GRANT walpost TO dba`)
	owner("")
	s.cfg.Admin.URL = admin
	s.exec(`CREATE TABLE outbox_events (); ALTER TABLE outbox_events OWNER TO dba`)
	owner("dba")
}

// TestBrokenOff: a set-up that ended after any step is completed by the next.
func TestBrokenOff(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	for k, n := 0, 1; k < n; k++ {
		s := newSite(t, pg, fmt.Sprintf("broken%d", k))
		s.cfg.Role, s.cfg.Owner, s.cfg.App = s.name+" relay", s.name+" owner", s.name+" app"
		s.exec(`CREATE ROLE "` + s.cfg.App + `"`)
		steps := s.plan(k)
		n = len(steps)
		s.plan(-1)
		s.complete()
	}
}

// TestRoleThatExists: its password is not known, and it lacks what a relay needs.
func TestRoleThatExists(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}), "shop")
	s.exec(`CREATE ROLE walpost PASSWORD 'old'`)
	s.fails(`role "walpost" exists, and its password is not known`)
	s.must(os.WriteFile(s.cfg.PasswordFile, []byte("wrong\n"), 0o600))
	s.asks("walpost")
	s.exec(`ALTER ROLE walpost LOGIN`)
	s.fails("has another password than it")
	s.must(os.WriteFile(s.cfg.PasswordFile, []byte("old\n"), 0o600))
	s.plan(0)
	s.exec(`ALTER ROLE walpost NOLOGIN`)
	s.cfg.NewPassword = true
	s.golden("role.golden", s.plan(-1))
	s.cfg.NewPassword = false
	s.complete()
	_, err := s.as("walpost")
	s.must(err)
}

// TestWithoutSuperuser: a role that may create roles, as that of a managed service, does what it may.
func TestWithoutSuperuser(t *testing.T) {
	t.Parallel()
	replica := testenv.PGOptions{Settings: map[string]string{"wal_level": "replica"}}
	testenv.ClustersWith(t, replica, func(t *testing.T, pg *testenv.Postgres) {
		s := newSite(t, pg, "shop")
		s.exec(`CREATE ROLE master LOGIN CREATEROLE CREATEDB; ALTER DATABASE shop OWNER TO master`)
		s.cfg.Admin.URL = pg.URLFor("master", "shop")
		s.golden("master.golden", s.plan(-1))
		s.must(pg.Exec(t.Context(), "shop", `ALTER ROLE walpost REPLICATION`))
		s.must(pg.Exec(t.Context(), "shop", `ALTER SYSTEM SET wal_level = 'logical'`))
		s.must(pg.Restart(t.Context()))
		s.complete()

		// As on RDS.
		r := newSite(t, pg, "shop2")
		r.exec(`CREATE ROLE rds_superuser; CREATE ROLE rds_replication; GRANT rds_replication TO master WITH ADMIN OPTION;
			ALTER DATABASE shop2 OWNER TO master`)
		r.exec(`ALTER SYSTEM RESET wal_level`)
		r.must(pg.Restart(t.Context()))
		r.cfg.Admin.URL, r.cfg.Role = pg.URLFor("master", "shop2"), "walpost2"
		r.golden("rds.golden", r.plan(-1))

		// Where nothing can be done, it says so before it does anything.
		r.exec(`CREATE ROLE stranger LOGIN`)
		r.cfg.Admin.URL = pg.URLFor("stranger", "shop2")
		r.fails(`"stranger" may not act as role "walpost2", which is to own the tables`)
		r.cfg.Owner, r.cfg.Role = "stranger", "third"
		r.fails(`role "third" does not exist, and "stranger" may not create roles`)
		r.cfg.Admin.URL, r.cfg.App = pg.URLFor("master", "shop2"), "nobody"
		r.cfg.Owner = ""
		r.fails(`role "nobody" of the application does not exist`)
	})
}

// TestFailure: what fails is named with its step, and what was done stays.
func TestFailure(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}), "shop")
	s.exec(`CREATE TABLE outbox_replays (x int)`)
	x, err := Open(t.Context(), s.cfg)
	s.must(err)
	defer x.Close()
	steps, err := x.Plan(t.Context())
	s.must(err)
	done := 0
	err = x.Do(t.Context(), steps, func(int) { done++ })
	if err == nil || !strings.Contains(err.Error(), "step 6: ") || !strings.Contains(hint.Of(err), "run `walpost init` again") {
		t.Errorf("it ended with %v (hint: %s)", err, hint.Of(err))
	}
	if done != 4 {
		t.Errorf("%d steps were done before", done)
	}
	s.exec(`DROP TABLE outbox_replays`)
	s.plan(-1)
	s.complete()
}

// TestTablesOfAnotherTool: what --print wrote, psql has applied, as a superuser or as the database's owner.
func TestTablesOfAnotherTool(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	for _, role := range []string{"postgres", "master"} {
		s := newSite(t, pg, "of_"+role)
		if role == "master" {
			s.exec(`CREATE ROLE master LOGIN CREATEROLE; ALTER DATABASE of_master OWNER TO master; GRANT deploy TO master;
				GRANT CREATE ON SCHEMA public TO deploy`)
			s.cfg.Admin.URL, s.cfg.Poll = pg.URLFor("master", s.name), true
		} else {
			s.exec(`CREATE ROLE deploy`)
		}
		s.cfg.Owner, s.cfg.Role = "deploy", "relay_of_"+role
		conn, err := pgx.Connect(t.Context(), s.cfg.Admin.URL)
		s.must(err)
		defer conn.Close(context.Background())
		for _, step := range s.plan(0) {
			if strings.Contains(step.Script, "CREATE TABLE") {
				_, err := conn.Exec(t.Context(), step.Script)
				s.must(err)
			}
		}
		s.plan(-1)
		s.complete()
		s.exec(`DO $$ BEGIN ASSERT to_regclass('walpost_migrations_relay') IS NULL;
			ASSERT (SELECT count(*) = 0 FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relowner <> 'deploy'::regrole);
			ASSERT (SELECT count(*) = 0 FROM pg_proc WHERE pronamespace = 'public'::regnamespace AND proowner <> 'deploy'::regrole); END $$`)
	}
}

func TestRelayURL(t *testing.T) {
	for _, c := range []struct{ admin, want string }{
		{"postgres://postgres:p%40ss@db:5432/shop", "postgres://walpost@db:5432/shop"},
		{"postgresql://postgres@db", "postgresql://walpost@db/the%20shop"},
		{"postgres://a:b@h1:1,h2:2/shop?target_session_attrs=read-write", "postgres://walpost@h1:1,h2:2/shop?target_session_attrs=read-write"},
		{"postgres:///shop?host=/run/pg&user=x&password=y&sslkey=k", "postgres://walpost@/shop?host=%2Frun%2Fpg"},
		{"postgres://db?dbname=shop&options=-c%20a%3Db", "postgres://walpost@db?dbname=shop&options=-c%20a%3Db"},
	} {
		got, err := RelayURL(pg.Config{URL: c.admin}, "walpost", "the shop")
		if err != nil || got != c.want {
			t.Errorf("%s: %s, %v, want %s", c.admin, got, err, c.want)
		}
	}
	for _, admin := range []string{"host=db user=postgres password=secret", "", "postgres://db?%zz"} {
		if got, err := RelayURL(pg.Config{URL: admin}, "walpost", "shop"); err == nil || hint.Of(err) == "" ||
			strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %s, %v", admin, got, err)
		}
	}
}

func TestVerifierRefusesWhatItCannotPrepare(t *testing.T) {
	if _, err := verifier("pässword"); err == nil || strings.Contains(err.Error(), "pässword") {
		t.Errorf("error %v", err)
	}
}
