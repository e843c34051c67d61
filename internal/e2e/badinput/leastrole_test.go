package badinput

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// leastSQL is a role that has nothing, and that of a producer, not even from PUBLIC. What it needs on the tables
// they have from deploy/grants.sql.
const leastSQL = publish + `
	CREATE ROLE NAME LOGIN REPLICATION;
	REVOKE ALL ON DATABASE NAME FROM PUBLIC;
	REVOKE ALL ON SCHEMA public FROM PUBLIC;
	REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC;
	REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC;
	CREATE ROLE NAME_shop LOGIN;
	GRANT CONNECT ON DATABASE NAME TO NAME, NAME_shop;
	GRANT USAGE ON SCHEMA public TO NAME, NAME_shop`

const grantsFile = "../../../deploy/grants.sql"

// TestLeastPrivileges: the grants that deploy/grants.sql has for a mark, and `migrate up --grant` gives,
// are enough to deliver, to park, to make dead letters, and to end in peace.
func TestLeastPrivileges(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	for _, mark := range []string{"update", "delete", "journal"} {
		t.Run(mark, func(t *testing.T) {
			s := *s
			s.t = t
			name := "least_" + mark
			sql := strings.ReplaceAll(leastSQL, "NAME", name)
			if mark == "journal" {
				sql = appendOnly + sql
			}
			s.newDB(name, sql)
			s.grant(name, map[string]string{"relay": name, "mark": mark, "outbox": outbox.DefaultTable, "producer": name + "_shop"})
			s.relayLeast(name, mark)
			s.produceLeast(name, outbox.Inserter{}, outbox.Message{
				TenantID: 7, AggregateType: "order", AggregateID: 42, EventType: "order.placed", Payload: []byte("{}"), TraceID: "t",
				OccurredAt: time.Now(), AvailableAt: time.Now(),
			})
		})
	}
	t.Run("producer of outbox_events", func(t *testing.T) {
		s := *s
		s.t = t
		const name = "producer_of_events"
		s.newDB(name, strings.ReplaceAll(leastSQL, "NAME", name))
		cmd := exec.Command(s.program, "migrate", "up")
		cmd.Dir, cmd.Env = t.TempDir(), []string{"WALPOST_POSTGRES_URL=" + s.pg.URL(name), "WALPOST_LAYOUT=append"}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("walpost migrate up: %v\n%s", err, out)
		}
		s.grant(name, map[string]string{"relay": name, "producer": name + "_shop"})
		s.produceLeast(name, outbox.Inserter{Table: outbox.AppendTable, Layout: outbox.Append(), HeadersColumn: "headers"}, outbox.Message{
			TenantID: 7, AggregateType: "order", AggregateID: "A-42", AggregateVersion: 1, EventType: "order.placed", Payload: []byte("{}"),
			TraceID: "t", OccurredAt: time.Now(), AvailableAt: time.Now(), Headers: map[string]string{"x": "y"},
		})
	})
}

// grant runs the script with the program that it is written for, where there is one.
func (s *site) grant(database string, vars map[string]string) {
	s.t.Helper()
	program, err := exec.LookPath("psql")
	if err != nil {
		grants, err := os.ReadFile(grantsFile)
		s.must(err)
		s.connected(database, func(conn *pgx.Conn) {
			script := psql{t: s.t, conn: conn, vars: vars}
			script.run(string(grants))
		})
		return
	}
	args := []string{"--no-psqlrc", "--set=ON_ERROR_STOP=1", "--file=" + grantsFile}
	for name, value := range vars {
		args = append(args, "--set="+name+"="+value)
	}
	if out, err := exec.CommandContext(s.t.Context(), program, append(args, s.pg.URL(database))...).CombinedOutput(); err != nil {
		s.t.Fatalf("psql: %v\n%s", err, out)
	}
}

// produceLeast: a producer inserts an event with everything that it may have, and can do nothing else.
func (s *site) produceLeast(database string, inserter outbox.Inserter, event outbox.Message) {
	s.t.Helper()
	conn, err := pgx.Connect(s.t.Context(), s.pg.URLFor(database+"_shop", database))
	s.must(err)
	defer conn.Close(s.t.Context())
	_, err = inserter.Insert(s.t.Context(), conn, event)
	s.must(err)
	own := []string{"id"}
	name := inserter.Table
	if name == "" {
		name = outbox.DefaultTable
		own = append(own, "processed_at", "attempts", "last_error")
	}
	s.must(s.pg.Exec(s.t.Context(), database, "SELECT "+strings.Join(own, ", ")+" FROM "+name))
	for _, column := range own {
		s.denied(conn, fmt.Sprintf(`INSERT INTO %s (aggregate_type, aggregate_id, event_type, payload, %s) VALUES ('order', 1, 'order.placed', '{}', NULL)`, name, column))
		s.denied(conn, fmt.Sprintf(`UPDATE %s SET %s = NULL`, name, column))
	}
	for _, sql := range []string{
		`SELECT payload FROM OUTBOX`, `SELECT occurred_at FROM OUTBOX`, `UPDATE OUTBOX SET payload = '{}'`,
		`DELETE FROM OUTBOX`, `TRUNCATE OUTBOX`, `SELECT FROM OUTBOX FOR UPDATE`,
		`SELECT id FROM outbox_messages_dlq`, `SELECT id FROM outbox_messages_archive`, `SELECT ids FROM outbox_journal`,
	} {
		s.denied(conn, strings.ReplaceAll(sql, "OUTBOX", name))
	}
}

func (s *site) denied(conn *pgx.Conn, sql string) {
	s.t.Helper()
	var refused *pgconn.PgError
	_, err := conn.Exec(s.t.Context(), sql)
	// Ids that are always generated are refused before privileges are looked at.
	if !errors.As(err, &refused) || refused.Code != pgerrcode.InsufficientPrivilege && refused.Code != pgerrcode.GeneratedAlways {
		s.t.Errorf("%s: %v, want it denied", sql, err)
	}
}

// outcomes say when a row was delivered and marked, and another one made a dead letter.
var outcomes = map[string]string{
	"update":  `SELECT count(processed_at) = 1 AND count(*) = 1 FROM outbox_messages`,
	"delete":  `SELECT count(*) = 0 FROM outbox_messages`,
	"journal": `SELECT count(*) = 2 AND (SELECT string_agg(concat(kind, ids), ' ' ORDER BY ids) FROM outbox_journal) = 'stored{[1,2)} dead{[2,3)}' FROM outbox_messages`,
}

// buried says so of the dead letter.
const buried = `SELECT count(*) = 1 AND min(attempts) = 2 FROM outbox_messages_dlq`

// relayLeast runs a relay as the role, and looks at what becomes of two rows.
func (s *site) relayLeast(name, mark string) {
	s.t.Helper()
	c := badStart{name: name, sql: leastSQL, user: name, env: map[string]string{
		"WALPOST_MARK": mark, "WALPOST_FALLBACK_MAX_ATTEMPTS": "1", "WALPOST_FALLBACK_BACKOFF": "10ms",
	}}
	cmd := exec.Command(s.program, "run")
	cmd.Dir, cmd.Env = s.t.TempDir(), c.environment(s)
	logFile := filepath.Join(cmd.Dir, "log")
	relay, err := testenv.StartProgram(cmd, logFile)
	s.must(err)

	s.connected(name, func(conn *pgx.Conn) {
		// The slot comes first, so that the WAL brings the rows.
		s.until(conn, fmt.Sprintf(`SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = '%s' AND active)`, name), logFile)
		insert := `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', 1, 'order.placed', '{}'), ('order', 2, 'no subject', '{}')`
		insert = "SET ROLE " + name + "_shop; " + insert + "; RESET ROLE"
		_, err := conn.Exec(s.t.Context(), insert)
		s.must(err)
		s.until(conn, buried, logFile)
		s.until(conn, outcomes[mark], logFile)
	})
	s.must(relay.Signal(syscall.SIGTERM))
	<-relay.Done()
	s.must(relay.Err())
	stream, err := s.js.Stream(s.t.Context(), name)
	s.must(err)
	if n := stream.CachedInfo().State.Msgs; n != 1 {
		s.t.Errorf("%d messages were stored, want 1", n)
	}
	log, err := os.ReadFile(logFile)
	s.must(err)
	if denied.Match(log) {
		s.t.Errorf("something was denied:\n%s", log)
	}
}

// denied is how PostgreSQL and NATS say it.
var denied = regexp.MustCompile(`(?i)permission`)

// until waits for a statement to say true.
func (s *site) until(conn *pgx.Conn, sql, logFile string) {
	s.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		var holds bool
		s.must(conn.QueryRow(s.t.Context(), sql).Scan(&holds))
		if holds {
			return
		}
	}
	log, _ := os.ReadFile(logFile)
	s.t.Fatalf("waited in vain for %s\n%s", sql, log)
}
