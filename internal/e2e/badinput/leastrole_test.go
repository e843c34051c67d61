package badinput

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
)

// leastSQL is a role that has nothing, not even from PUBLIC. What it needs on the tables
// it has from deploy/grants.sql.
const leastSQL = publish + `
	CREATE ROLE NAME LOGIN REPLICATION;
	REVOKE ALL ON DATABASE NAME FROM PUBLIC;
	REVOKE ALL ON SCHEMA public FROM PUBLIC;
	REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC;
	REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC;
	GRANT CONNECT ON DATABASE NAME TO NAME;
	GRANT USAGE ON SCHEMA public TO NAME`

// TestLeastPrivileges: the grants that deploy/grants.sql has for a mark, and the README
// for the default one, are enough to deliver, to park, to bury, and to end in peace.
func TestLeastPrivileges(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	grants, err := os.ReadFile("../../../deploy/grants.sql")
	s.must(err)
	for _, mark := range []string{"update", "delete", "none"} {
		t.Run(mark, func(t *testing.T) {
			s := *s
			s.t = t
			name := "least_" + mark
			s.newDB(name, strings.ReplaceAll(leastSQL, "NAME", name))
			s.connected(name, func(conn *pgx.Conn) {
				script := psql{t: t, conn: conn, vars: map[string]string{"relay": name, "mark": mark}}
				script.run(string(grants))
			})
			s.relayLeast(name, mark)
		})
	}
}

// outcomes say when a row was delivered and marked, and another one buried.
var outcomes = map[string]string{
	"update": `SELECT count(processed_at) = 1 AND count(*) = 1 FROM outbox_messages`,
	"delete": `SELECT count(*) = 0 FROM outbox_messages`,
	"none":   `SELECT true`, // nothing is done to the table
}

// buries says so of the dead letters: without marks a row has only one try.
var buries = map[string]string{
	"update": `SELECT count(*) = 1 AND min(attempts) = 2 FROM outbox_messages_dlq`,
	"delete": `SELECT count(*) = 1 AND min(attempts) = 2 FROM outbox_messages_dlq`,
	"none":   `SELECT count(*) = 1 FROM outbox_messages_dlq`,
}

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
		if mark == "none" {
			insert = "BEGIN; " + insert + "; DELETE FROM outbox_messages; COMMIT"
		}
		_, err := conn.Exec(s.t.Context(), insert)
		s.must(err)
		s.until(conn, buries[mark], logFile)
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
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		var holds bool
		s.must(conn.QueryRow(s.t.Context(), sql).Scan(&holds))
		if holds {
			return
		}
	}
	log, _ := os.ReadFile(logFile)
	s.t.Fatalf("waited in vain for %s\n%s", sql, log)
}
