package badinput

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
)

// leastSQL is all that the relay's role has: what the README grants, and
// nothing from PUBLIC.
const leastSQL = publish + `
	CREATE ROLE least LOGIN REPLICATION;
	REVOKE ALL ON DATABASE least FROM PUBLIC;
	REVOKE ALL ON SCHEMA public FROM PUBLIC;
	REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA public FROM PUBLIC;
	REVOKE EXECUTE ON FUNCTION pg_control_system() FROM PUBLIC;
	GRANT CONNECT ON DATABASE least TO least;
	GRANT USAGE ON SCHEMA public TO least;
	GRANT SELECT, UPDATE (processed_at, attempts, last_error, available_at), DELETE ON outbox_messages TO least;
	GRANT SELECT, INSERT ON outbox_messages_dlq TO least`

// TestLeastPrivileges: the grants of the README are enough to deliver, to park, to
// bury, and to end in peace.
func TestLeastPrivileges(t *testing.T) {
	t.Parallel()
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	s.newDB("least", leastSQL)
	c := badStart{name: "least", sql: leastSQL, user: "least", env: map[string]string{
		"WALPOST_FALLBACK_MAX_ATTEMPTS": "1", "WALPOST_FALLBACK_BACKOFF": "10ms",
	}}
	cmd := exec.Command(s.program, "run")
	cmd.Dir, cmd.Env = t.TempDir(), c.environment(s)
	logFile := filepath.Join(cmd.Dir, "log")
	relay, err := testenv.StartProgram(cmd, logFile)
	s.must(err)

	s.connected("least", func(conn *pgx.Conn) {
		// The slot comes first, so that the WAL brings the rows.
		s.until(conn, `SELECT EXISTS (SELECT FROM pg_replication_slots WHERE active)`, logFile)
		_, err := conn.Exec(t.Context(), `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
			VALUES ('order', 1, 'order.placed', '{}'), ('order', 2, 'no subject', '{}')`)
		s.must(err)
		s.until(conn, `SELECT count(processed_at) = 1 AND count(*) = 1 FROM outbox_messages`, logFile)
		s.until(conn, `SELECT count(*) = 1 AND min(attempts) = 2 FROM outbox_messages_dlq`, logFile)
	})
	s.must(relay.Signal(syscall.SIGTERM))
	<-relay.Done()
	s.must(relay.Err())
	log, err := os.ReadFile(logFile)
	s.must(err)
	if denied.Match(log) {
		t.Errorf("something was denied:\n%s", log)
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
