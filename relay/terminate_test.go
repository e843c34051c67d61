package relay_test

import (
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// Somebody ends the relay's connections with pg_terminate_backend, under load:
// the one that holds the lock and marks, or the walsender. The relay gets both
// back, and no event is lost or stored twice over it.
func TestConnectionsAreTerminated(t *testing.T) {
	connections := []struct{ name, pid string }{
		{"lock", `SELECT DISTINCT pid FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`},
		{"walsender", `SELECT active_pid FROM pg_replication_slots WHERE active_pid IS NOT NULL AND database = current_database()`},
	}
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		for _, c := range connections {
			t.Run(c.name, func(t *testing.T) {
				r := newRig(t, pg)
				l := newLedger(r)
				x := r.start().streaming()
				stop := l.start(load{writers: 4, rows: 10, pause: 50 * time.Millisecond})
				for range 5 {
					before := r.storedCount()
					eventually(t, "events are stored", func() bool { return r.storedCount() > before })
					var pid string
					eventually(t, "there is a connection to end", func() bool {
						pid = r.query1(`SELECT coalesce((` + c.pid + `), 0)`)
						return r.query1(`SELECT coalesce((SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = $1::int), false)`, pid) == "true"
					})
					eventually(t, "another connection takes its place", func() bool {
						now := r.query1(`SELECT coalesce((` + c.pid + `), 0)`)
						return now != "0" && now != pid
					})
				}
				stop()
				l.delivered()
				x.halt()
				r.must(x.err)
			})
		}
	})
}
