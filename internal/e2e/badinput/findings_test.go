package badinput

import (
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pglogrepl"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

// healthy is what doctor finds at every server of these tests whose WAL can be read.
const healthy = "info pg-server, info pg-clock, info nats-server, warn pg-wal-unlimited"

// unprovoked are the codes that no server here has a reason for.
var unprovoked = []string{
	"pg-version",             // there is none that old
	"pg-hash",                // or of another byte order
	"publication-no-filters", // or 14
	"nats-no-fast-batches",   // nats-server is the one of go.mod
	"table-mark",             // the configuration is refused before
	"nats-max-consumers",     // internal/jetstream.TestAccountsConsumers
	"slot-shared",            // relay.TestStandbyServesSomethingElse
	"outbox-shared",          // relay.TestOutboxOfTwoRelays
	"table-copied",           // relay.TestCopiedDatabase
	"table-overlooked",       // relay.TestVerifyFindsWhatNoSearchFinds
	"table-journal-index",    // relay.TestJournalIndexLacksEntries
	"table-owner",            // internal/table.TestPartitionsOfAnotherRole
	"catalog", "catalog-new", // cmd/walpost.TestRunScripts, TestScripts
	"http-token-file", // cmd/walpost.TestScripts
}

// expected are the findings of the cases below, as they are told.
var expected []string

// finding is one thing that a start does not refuse, or not at first.
type finding struct {
	badStart
	want string // all that doctor has to find besides what is healthy, "level code, ..."
}

// find runs doctor on every case, and compares both servers with what they were before.
func find(t *testing.T, s *site, cases []finding) {
	t.Helper()
	for i := range cases {
		cases[i].arrange(s)
	}
	before := s.snapshot()
	for i := range cases {
		c := &cases[i]
		t.Run(c.name, func(t *testing.T) {
			d := diagnose(t.Context(), s, t.TempDir(), c.environment(s))
			var got []string
			for _, f := range d.Findings {
				if name := string(f.Level) + " " + f.Code; strings.Contains(healthy, name) {
					expected = append(expected, name)
				} else if !slices.Contains(got, name) {
					got = append(got, name)
				}
				if f.Text == "" || strings.ContainsAny(f.Text+f.Fix, "\n\t") {
					t.Errorf("%+v", f)
				}
			}
			want := strings.Split(c.want, ", ")
			slices.Sort(got)
			slices.Sort(want)
			if !slices.Equal(got, want) {
				t.Errorf("found\n%q, want\n%q\n%s%s", got, want, &d.stdout, &d.stderr)
			}
			if code := min(d.errors(), 1); d.exitCode() != code {
				t.Errorf("ends with %v, want %d", d.err, code)
			}
			expected = append(expected, want...)
		})
	}
	compare(t, before, s.snapshot())
}

const (
	published = `CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert', publish_via_partition_root = true);`
	oneRow    = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'placed', '{}');`
	slotSQL   = `SELECT pg_create_logical_replication_slot('%s', '%s')`
	// newStream is what doctor finds where the stream is to be made.
	newStream = "info stream-missing"
	fresh     = newStream + ", info slot-missing"
)

func tableFindings() []finding {
	env := func(pairs ...string) map[string]string {
		m := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			m[pairs[i]] = pairs[i+1]
		}
		return m
	}
	return []finding{
		{badStart{name: "first_start"}, fresh + ", info publication-missing"},
		{badStart{name: "migrated", sql: published}, fresh},
		{
			badStart{name: "renamed", sql: published + `;` + testenv.SettledTo("public.outbox_messages", 0, "") + `; UPDATE outbox_known SET outbox = 'public.old'`},
			fresh + ", info table-known",
		},
		{badStart{name: "writable", sql: published + `; GRANT CREATE ON SCHEMA public TO PUBLIC`}, fresh + ", warn pg-schema-writable"},
		{
			badStart{
				name: "much_is_wrong",
				sql: `CREATE PUBLICATION walpost FOR TABLE outbox_messages WHERE (tenant_id = 7) WITH (publish = 'update'); CREATE ROLE much LOGIN REPLICATION;
					ALTER TABLE outbox_messages ALTER available_at DROP DEFAULT, ALTER available_at TYPE text, DROP attempts, DROP CONSTRAINT outbox_messages_pkey;
					DROP INDEX outbox_messages_pending_idx; DROP TABLE outbox_messages_dlq`,
				user: "much", env: env("WALPOST_NATS_URL", "nats://127.0.0.1:1"),
			},
			"error table-columns, error table-column-type, error table-id-index, error table-privileges, error table-known-privileges, error table-dead-letters-missing, " +
				"error publication-inserts, error publication-filter, error nats-unreachable, info slot-missing",
		},
		{
			badStart{name: "debezium", sql: debeziumSQL + `CREATE PUBLICATION walpost FOR TABLE outbox WITH (publish = 'insert')`, env: debeziumEnv},
			fresh + ", warn table-mark-delete, warn table-no-failure-columns, warn table-no-time, warn table-ids-unordered",
		},
		{
			badStart{
				name: "status_undated",
				sql: `CREATE TABLE outbox (id bigint PRIMARY KEY, kind text, body jsonb, state int DEFAULT 0, at timestamptz, tries int, why text);
					CREATE PUBLICATION walpost FOR TABLE outbox WITH (publish = 'insert')`,
				env: env("WALPOST_TABLE", "outbox", "WALPOST_MARK", "state=2", "WALPOST_LAYOUT",
					"id=id,event_type=kind,payload=body,occurred_at=at,attempts=tries,last_error=why"),
			},
			fresh + ", warn table-mark-undated",
		},
		{
			badStart{name: "kept_for_ever", sql: published, env: env("WALPOST_RETENTION_ARCHIVE_AFTER", "0s")},
			fresh + ", info table-grows",
		},
		{
			badStart{name: "indexes", sql: published + `DROP INDEX outbox_messages_pending_idx, outbox_messages_due_idx`},
			fresh + ", warn table-index",
		},
		{
			badStart{name: "large", sql: published + `UPDATE pg_class SET reltuples = 6e7 WHERE oid = 'outbox_messages'::regclass`},
			fresh + ", warn table-large",
		},
		{
			badStart{name: "half_partitioned", sql: published + `ALTER TABLE outbox_messages ADD CONSTRAINT walpost_bounds CHECK (occurred_at < '2099-01-01') NOT VALID`},
			fresh + ", warn table-half-partitioned",
		},
		{
			badStart{name: "untrusted", sql: published + `DROP TABLE outbox_replays; CREATE VIEW outbox_replays AS SELECT 1 AS replay_id`},
			"error table-untrusted, warn stream-missing",
		},
		{
			badStart{name: "rows", sql: published + oneRow + `INSERT INTO outbox_messages_dlq (outbox, row_id) VALUES ('public.outbox_messages', '1')`},
			fresh + ", warn table-pending, warn table-dead-letters",
		},
		{
			badStart{name: "other_tables", sql: published + `ALTER PUBLICATION walpost ADD TABLE outbox_messages_dlq`},
			fresh + ", warn publication-other-tables",
		},
		{
			badStart{name: "parked", sql: published + oneRow + `UPDATE outbox_messages SET attempts = 1, last_error = 'subject: a space'`},
			fresh + ", warn table-pending, warn table-parked",
		},
		{ // whoever may create the table would have his code run by this superuser
			badStart{name: "owner_unknown", sql: `CREATE ROLE owns_schema; GRANT CREATE ON SCHEMA public TO owns_schema`, env: env("WALPOST_TABLE", "outbox_mesages")},
			"error table-untrusted, warn stream-missing",
		},
		{
			badStart{name: "unread", sql: debeziumSQL + `CREATE PUBLICATION walpost FOR TABLE outbox WITH (publish = 'insert');` + oneRow, env: debeziumEnv},
			fresh + ", warn table-unread, warn table-mark-delete, warn table-no-failure-columns, warn table-no-time, warn table-ids-unordered",
		},
		{
			badStart{
				name: "no_system_identifier", user: "unidentified",
				sql: `CREATE ROLE unidentified LOGIN; REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC;
					GRANT SELECT, UPDATE, DELETE ON outbox_messages TO unidentified; GRANT SELECT, INSERT, UPDATE ON outbox_known, outbox_sent TO unidentified; GRANT SELECT, INSERT ON outbox_messages_dlq TO unidentified`,
				env: env("WALPOST_MODE", "poll"),
			},
			newStream + ", error pg-system-identifier, warn table-replays",
		},
		{
			badStart{
				name: "polls", user: "polls",
				sql: `CREATE ROLE polls LOGIN; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO polls; GRANT SELECT, INSERT, UPDATE ON outbox_known, outbox_sent TO polls; GRANT SELECT, INSERT ON outbox_messages_dlq TO polls;
					GRANT SELECT, UPDATE ON outbox_replays TO polls`,
			},
			newStream + ", warn pg-role-replication",
		},
		{
			badStart{
				name: "no_sent", user: "no_sent",
				sql: `CREATE ROLE no_sent LOGIN; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO no_sent; GRANT SELECT, INSERT ON outbox_messages_dlq TO no_sent;
					GRANT SELECT, UPDATE ON outbox_replays TO no_sent; GRANT SELECT, INSERT, UPDATE ON outbox_known TO no_sent`,
			},
			newStream + ", error table-sent-privileges, warn pg-role-replication",
		},
		{
			badStart{name: "left_slot", sql: "SELECT", then: []string{fmt.Sprintf(slotSQL, "left_over", "pgoutput"), published}},
			fresh + ", warn pg-slot-unused",
		},
	}
}

func slotFindings() []finding {
	own := func(name, slot, plugin string, env ...string) badStart {
		b := badStart{name: name, sql: published, then: []string{fmt.Sprintf(slotSQL, slot, plugin)}, env: map[string]string{}}
		for i := 0; i < len(env); i += 2 {
			b.env[env[i]] = env[i+1]
		}
		return b
	}
	over := own("over", "over", "pgoutput", "WALPOST_MAX_RETAINED_WAL", "64MiB")
	over.then = append(over.then, slices.Repeat([]string{oneRow + `SELECT pg_switch_wal()`}, 5)...)
	both := own("both", "both", "pgoutput")
	both.then = append(both.then, fmt.Sprintf(slotSQL, "both_new", "pgoutput"))
	return []finding{
		{own("idle", "idle", "pgoutput"), newStream + ", info slot-idle"},
		{own("unfinished", "unfinished_new", "pgoutput"), fresh + ", error slot-unfinished"},
		{both, newStream + ", info slot-idle, warn slot-unfinished"},
		{over, newStream + ", info slot-idle, warn slot-over-budget, warn table-pending"},
	}
}

func streamFindings(s *site) []finding {
	_, err := s.js.CreateStream(s.t.Context(), jetstream.StreamConfig{Name: "ORDERS", Subjects: []string{"orders.>"}})
	s.must(err)
	small := testenv.NewNATS(s.t, testenv.NATSOptions{MaxPayload: 100_000})
	of := func(name string, change func(*jetstream.StreamConfig), env ...string) badStart {
		b := badStart{name: name, sql: published, stream: &jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}}, env: map[string]string{}}
		change(b.stream)
		for i := 0; i < len(env); i += 2 {
			b.env[env[i]] = env[i+1]
		}
		return b
	}
	plain := func(*jetstream.StreamConfig) {}
	const exists = "warn stream-one-replica, info slot-missing, "
	return []finding{
		{
			of("weak", func(c *jetstream.StreamConfig) {
				c.Subjects, c.AllowRollup, c.Storage, c.Discard, c.MaxMsgs = []string{"weak.*"}, true, jetstream.MemoryStorage, jetstream.DiscardOld, 100_000
				c.MaxAge, c.MaxMsgSize, c.Duplicates = time.Hour, 1000, time.Second
				c.SubjectTransform = &jetstream.SubjectTransformConfig{Source: "weak.*", Destination: "weaker.$1"}
			}),
			exists + "warn stream-rollup, warn stream-memory, warn stream-discard-old, warn stream-max-age, warn stream-max-msg-size, " +
				"warn stream-short-duplicate-window, warn stream-subjects-partial, warn stream-transform",
		},
		{
			of("accepted", func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy }, "WALPOST_ACCEPT_WEAK_STREAM", "true"),
			exists + "warn stream-interest",
		},
		{of("fast", plain, "WALPOST_BATCH", "fast"), exists + "error stream-no-fast-batches"},
		{of("atomic", plain, "WALPOST_BATCH", "atomic"), exists + "error stream-no-atomic-batches"},
		{of("counter", func(c *jetstream.StreamConfig) { c.AllowMsgCounter = true }), exists + "error stream-counter"},
		{of("noread", plain, "WALPOST_NATS_URL", s.natsURL("noread")), exists + "error nats-api-denied"},
		{of("nopublish", plain, "WALPOST_NATS_URL", s.natsURL("nopublish")), exists + "warn nats-publish-denied"},
		{of("inbox", plain, "WALPOST_NATS_INBOX_PREFIX", "_INBOX"), exists + "warn nats-inbox"},
		{
			badStart{name: "small", sql: published, env: map[string]string{"WALPOST_NATS_URL": small.URL()}},
			fresh + ", warn nats-max-payload",
		},
	}
}

// TestFindings has what a start does not refuse, or not at first: every code is found
// where it should be, and nothing else is.
func TestFindings(t *testing.T) {
	pg := testenv.NewPostgres(t, testenv.PGOptions{Settings: map[string]string{"max_prepared_transactions": "2"}})
	s := newSite(t, pg)
	open := s.connection("postgres", "")
	_, err := open.Exec(t.Context(), `BEGIN; CREATE TABLE waits (); SELECT pg_sleep(6)`).ReadAll()
	s.must(err)
	find(t, s, []finding{{badStart{name: "transaction"}, fresh + ", info publication-missing, warn pg-old-transaction"}})
	_, err = open.Exec(t.Context(), `PREPARE TRANSACTION 'left'`).ReadAll()
	s.must(err)
	find(t, s, []finding{{badStart{name: "prepared"}, fresh + ", info publication-missing, warn pg-prepared-transaction"}})
	s.must(pg.Exec(t.Context(), "postgres", `ROLLBACK PREPARED 'left'`))

	// Before there are other slots, which a new one lags behind with.
	newer := badStart{name: "newer", sql: "SELECT", then: []string{fmt.Sprintf(slotSQL, "newer", "pgoutput"), published}}
	find(t, s, []finding{{newer, newStream + ", info slot-idle, warn publication-newer"}})
	s.must(pg.Exec(t.Context(), "newer", `SELECT pg_drop_replication_slot('newer')`))
	find(t, s, slices.Concat(tableFindings(), slotFindings(), streamFindings(s)))
	s.weak()
	s.consumed()
	s.written()
	s.inUse()
	s.managed()
	s.limits()
	s.lastSender()
	s.newerServer()
	if t.Failed() {
		return // some expectations may be missing
	}
	expected = append(expected, "warn config-variable") // of the command: testdata/run/doctor.txtar has it
	for _, code := range startCodes {
		expected = append(expected, "error "+code)
	}
	for _, code := range documented(t) {
		found := slices.ContainsFunc(expected, func(e string) bool { return strings.HasSuffix(e, " "+code) })
		if found == slices.Contains(unprovoked, code) {
			t.Errorf("%s: provoked %t, and said not to be: %t", code, found, !found)
		}
	}
}

// connection is one of the test's own, in replication mode where that is "database". It waits for a walsender that a
// command before it has left and that is not gone yet.
func (s *site) connection(database, replication string) *pgconn.PgConn {
	s.t.Helper()
	url := s.pg.URL(database)
	if replication != "" {
		url += "&replication=" + replication
	}
	conn, err := pgconn.Connect(s.t.Context(), url)
	full := func() bool {
		var refused *pgconn.PgError
		return errors.As(err, &refused) && refused.Code == pgerrcode.TooManyConnections
	}
	for deadline := time.Now().Add(testenv.Patience); full() && time.Now().Before(deadline); {
		time.Sleep(20 * time.Millisecond)
		conn, err = pgconn.Connect(s.t.Context(), url)
	}
	s.must(err)
	s.t.Cleanup(func() { _ = conn.Close(s.t.Context()) })
	return conn
}

// written has a stream that another relay writes to.
func (s *site) written() {
	s.newDB("written", published)
	_, err := s.js.CreateStream(s.t.Context(), jetstream.StreamConfig{Name: "written", Subjects: []string{"written.>"}})
	s.must(err)
	msg := nats.NewMsg("written.order.placed")
	msg.Header.Set(nats.MsgIdHdr, "7712196687227994591/shop/public.outbox_events/1/1aae252f2c301d13")
	msg.Header.Set("ce-source", "7712196687227994591/shop")
	_, err = s.js.PublishMsg(s.t.Context(), msg)
	s.must(err)
	c := badStart{name: "written", env: map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("written")}}
	d := s.finds(c, "warn stream-writer")
	if !strings.Contains(d.stdout.String(), `7712196687227994591/shop`) {
		s.t.Errorf("doctor does not name the writer:\n%s", &d.stdout)
	}
	c.env["WALPOST_SHARED"] = "true"
	if d := s.finds(c, "info nats-server"); d.has("warn stream-writer") {
		s.t.Errorf("a shared stream has other writers:\n%s", &d.stdout)
	}
}

// inUse has a slot that something else streams, then one of a relay at work, and a table
// that is locked.
func (s *site) inUse() {
	s.newDB("used", published)
	s.must(s.pg.Exec(s.t.Context(), "used", fmt.Sprintf(slotSQL, "used", "pgoutput")))
	stranger := s.connection("used", "database")
	s.must(pglogrepl.StartReplication(s.t.Context(), stranger, "used", 0, pglogrepl.StartReplicationOptions{
		PluginArgs: []string{"proto_version '1'", "publication_names 'walpost'"},
	}))
	used := badStart{name: "used", env: map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("used")}}
	s.finds(used, newStream+", error slot-in-use") // the server moves a slot that is streamed
	s.must(stranger.Close(s.t.Context()))

	cmd := exec.Command(s.program, "run")
	cmd.Dir, cmd.Env = s.t.TempDir(), used.environment(s)
	relay, err := testenv.StartProgram(cmd, filepath.Join(cmd.Dir, "log"))
	s.must(err)
	s.connected("used", func(conn *pgx.Conn) {
		s.until(conn, `SELECT EXISTS (SELECT FROM pg_replication_slots s JOIN pg_stat_replication r ON r.pid = s.active_pid
			WHERE slot_name = 'used' AND application_name = 'walpost')`, filepath.Join(cmd.Dir, "log"))
	})
	d := s.finds(used, "warn stream-one-replica, info slot-active") // its slot moves by itself
	if d.errors() > 0 || d.exitCode() != 0 {
		s.t.Errorf("doctor finds errors where a relay is at work:\n%s", &d.stdout)
	}
	s.must(relay.Signal(syscall.SIGTERM))
	<-relay.Done()
	s.must(relay.Err())

	s.must(s.pg.Exec(s.t.Context(), "postgres", "CREATE DATABASE bytes TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' LC_CTYPE 'C'"))
	s.finds(badStart{name: "bytes", env: map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("bytes")}}, "warn pg-sql-ascii")

	s.newDB("locked", published)
	locker := s.connection("locked", "")
	_, err = locker.Exec(s.t.Context(), `BEGIN; LOCK TABLE outbox_messages`).ReadAll()
	s.must(err)
	d = s.finds(badStart{name: "locked", env: map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("locked")}}, "error table-unreadable, warn table-unreadable, info slot-missing")
	if !strings.Contains(d.stdout.String(), "another session has a lock on the table") {
		s.t.Errorf("doctor has no fix for a locked table:\n%s", &d.stdout)
	}
	s.must(locker.Close(s.t.Context()))
}

// finds is find for one case, at servers that do not stand still.
func (s *site) finds(c badStart, want string) *diagnosis {
	s.t.Helper()
	d := diagnose(s.t.Context(), s, s.t.TempDir(), c.environment(s))
	for _, w := range strings.Split(want, ", ") {
		if !d.has(w) {
			s.t.Errorf("%s: doctor has no %s:\n%s%s", c.name, w, &d.stdout, &d.stderr)
		}
		expected = append(expected, w)
	}
	return &d
}

// managed has the roles of managed services, one at a time. Roles are the server's, so each is dropped again.
func (s *site) managed() {
	s.newDB("managed", published)
	c := badStart{name: "managed", env: map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("managed")}}
	exec := func(sql string) { s.must(s.pg.Exec(s.t.Context(), "managed", sql)) }
	named := func(role, section string) {
		exec("CREATE ROLE " + role)
		d := s.finds(c, "info pg-managed")
		if !strings.Contains(d.stdout.String(), "docs/MANAGED.md#"+section) || d.errors() > 0 {
			s.t.Errorf("role %s: doctor does not name section %s:\n%s", role, section, &d.stdout)
		}
		exec("DROP ROLE " + role)
	}
	if d := diagnose(s.t.Context(), s, s.t.TempDir(), c.environment(s)); d.has("info pg-managed") {
		s.t.Errorf("doctor takes a plain server for a managed one:\n%s", &d.stdout)
	}
	named("rds_superuser", "amazon-rds")
	named("cloudsqlsuperuser", "google-cloud-sql")
	named("alloydbsuperuser", "alloydb")
	named("azure_pg_admin", "azure-database-for-postgresql")
	named("neon_superuser", "neon")
	named("supabase_admin", "supabase")
	exec("CREATE FUNCTION aurora_stat_logical_wal_cache() RETURNS int LANGUAGE sql AS 'SELECT 1'")
	named("rds_superuser", "amazon-aurora")
}

// weak has other hosts than this machine's among those that may be connected to.
func (s *site) weak() {
	s.newDB("unverified", published)
	s.finds(badStart{name: "unverified", env: map[string]string{
		"WALPOST_POSTGRES_URL": strings.Replace(s.pg.URL("unverified"), hostPort(s.pg.URL("unverified")), hostPort(s.pg.URL("unverified"))+",db.invalid:5432", 1),
		"WALPOST_NATS_URL":     s.natsURL("app") + ",nats://nats.invalid:4222",
	}}, "warn pg-tls-weak, warn nats-tls-weak, info slot-missing")
}

// consumed has a stream with as many consumers as it may have.
func (s *site) consumed() {
	c := badStart{name: "consumed", sql: published, stream: &jetstream.StreamConfig{Subjects: []string{"consumed.>"}, MaxConsumers: 1}}
	c.arrange(s)
	_, err := s.js.CreateConsumer(s.t.Context(), "consumed", jetstream.ConsumerConfig{Durable: "others"})
	s.must(err)
	s.finds(c, "warn stream-max-consumers")
}

// limits has settings that a relay suffers from.
func (s *site) limits() {
	s.newDB("limits", published)
	s.must(s.pg.Exec(s.t.Context(), "limits", fmt.Sprintf(slotSQL, "limits", "pgoutput")))
	for range 5 {
		s.must(s.pg.Exec(s.t.Context(), "limits", oneRow+`SELECT pg_switch_wal()`))
	}
	c := badStart{name: "limits", env: map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("limits")}}
	s.must(s.pg.Reload(s.t.Context(), map[string]string{"max_wal_size": "32MB", "min_wal_size": "32MB", "max_slot_wal_keep_size": "1MB", "synchronous_standby_names": `FIRST 1 (s1, "*")`}))
	s.finds(c, "warn slot-unreserved, warn pg-wal-limit, error pg-synchronous-standby")
	s.must(s.pg.Reload(s.t.Context(), map[string]string{"synchronous_standby_names": ""}))
	s.must(s.pg.Exec(s.t.Context(), "limits", oneRow+`SELECT pg_switch_wal()`))
	s.must(s.pg.Exec(s.t.Context(), "limits", `CHECKPOINT`))
	s.finds(c, "warn slot-lost")
	s.must(s.pg.Reload(s.t.Context(), map[string]string{"max_slot_wal_keep_size": "-1", "max_wal_size": "1GB"}))
}

// lastSender has one walsender, and then none.
func (s *site) lastSender() {
	s.restart(map[string]string{"max_wal_senders": "1"})
	c := badStart{name: "sender", env: map[string]string{"WALPOST_POSTGRES_URL": s.pg.URL("migrated")}}
	s.finds(c, "warn pg-few-wal-senders")
	taken := s.connection("migrated", "database")
	s.finds(c, "error pg-replication-connection")
	s.must(taken.Close(s.t.Context()))
}

// newerServer has what 17 and 18 can be set to.
func (s *site) newerServer() {
	all, err := pgbin.All()
	s.must(err)
	newest := slices.MaxFunc(all, func(a, b pgbin.Binaries) int { return a.Major - b.Major })
	if newest.Major < 18 {
		unprovoked = append(unprovoked, "pg-idle-slot-timeout", "pg-standby-slot")
		s.t.Logf("NOT SHOWN: PostgreSQL 18 is not here, so nothing says what doctor finds in its settings")
		return
	}
	site := newSite(s.t, testenv.NewPostgres(s.t, testenv.PGOptions{BinDir: newest.Dir, Settings: map[string]string{
		"idle_replication_slot_timeout": "60s", "synchronized_standby_slots": "nobody",
	}}))
	find(s.t, site, []finding{{
		badStart{name: "newest"},
		fresh + ", info publication-missing, warn pg-idle-slot-timeout, error pg-standby-slot",
	}})
}
