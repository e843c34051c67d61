package drill_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// refuses sees that a drill ends with an exit code, an error and a hint, before it writes or breaks anything.
func (r *rig) refuses(code int, want string, args ...string) {
	r.t.Helper()
	before := r.query(`SELECT concat(active_pid, ' ', (SELECT count(*) FROM outbox_messages)) FROM pg_replication_slots WHERE slot_name = current_database()`)
	o := r.await(r.begin(args...))
	if o.code != code || o.stdout != "" || !strings.Contains(o.stderr, want) || !strings.Contains(o.stderr, "\nhint: ") {
		r.t.Errorf("walpost drill %s ended with %d and %q, want %d and %q", strings.Join(args, " "), o.code, o.stderr, code, want)
	}
	after := r.query(`SELECT concat(active_pid, ' ', (SELECT count(*) FROM outbox_messages)) FROM pg_replication_slots WHERE slot_name = current_database()`)
	if before != after {
		r.t.Errorf("%q before and %q after a drill that was refused", before, after)
	}
}

// TestRefused: what may not be broken is not touched.
func TestRefused(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.walpost("migrate", "up")
		none := fmt.Sprintf("ALTER DATABASE %q SET drill.allow = '%s'", r.db, r.db)
		r.refuses(2, none, "slot-lost", "--yes")
		r.exec(`ALTER DATABASE ` + r.db + ` SET drill.allow = 'shop'`)
		r.refuses(2, `it names "shop"`, "slot-lost", "--yes")
		r.exec(`ALTER DATABASE ` + r.db + ` RESET drill.allow`)
		r.exec(`ALTER ROLE postgres SET drill.allow = '` + r.db + `'`)
		r.refuses(2, none, "slot-lost", "--yes")
		r.allow()
		r.refuses(1, `no relay of slot "`+r.db+`" runs`, "slot-lost", "--yes")
		r.start()
		r.refuses(2, "nothing was broken", "slot-lost")
		r.refuses(2, "give --pid or --kill", "relay-killed", "--yes")
		r.refuses(1, "kill process 4194304", "relay-killed", "--yes", "--pid", "4194304")
		r.refuses(2, "needs --standby and --stop", "failover", "--yes", "--stop", "true")
		r.refuses(2, "needs --restart", "nats-restart", "--yes")
		r.refuses(2, `"soon" is not a duration`, "slot-lost", "--yes", "--for", "soon")
		for standby, want := range map[string]string{
			"127.0.0.1:1": "postgres.url does not name the standby", fmt.Sprintf("127.0.0.1:%d", pg.Port()): "is no standby",
		} {
			r.refuses(1, want, "failover", "--yes", "--stop", "true", "--standby", "postgres://postgres@"+standby+"/"+r.db)
		}
		r.env = append(r.env, "WALPOST_MARK=delete")
		r.refuses(1, "no row would tell", "failover", "--yes", "--stop", "true", "--standby", "postgres://postgres@127.0.0.1:1/shop")
	})
}

// TestTheRelaysRole: it may break what it uses, and needs one more grant for the drill's events.
func TestTheRelaysRole(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.exec(`CREATE ROLE stager LOGIN REPLICATION`)
		r.walpost("migrate", "up", "--grant", "stager")
		r.allow()
		r.env = append(r.env, "WALPOST_POSTGRES_URL="+strings.Replace(pg.URL(r.db), "postgres@", "stager@", 1))
		r.start()
		r.refuses(1, "GRANT INSERT, SELECT", "slot-lost", "--yes")
		r.exec(`GRANT INSERT ON outbox_messages TO stager`)
		r.fine(r.drill("slot-lost"))
	})
}
