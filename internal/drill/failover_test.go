package drill_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// TestFailover: a standby that has everything is promoted. internal/chaos has one that lacks the last rows.
func TestFailover(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, primary *testenv.Postgres) {
		r := newRig(t, primary)
		r.walpost("migrate", "up")
		r.allow()
		standby := primary.NewStandby(t, "sb", nil)
		r.eventually("the standby has the database", `SELECT coalesce((SELECT replay_lsn >= pg_current_wal_insert_lsn()
			FROM pg_stat_replication WHERE application_name = 'sb'), false)`)
		at := fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", standby.Port(), r.db)
		either := func(second int) string {
			return fmt.Sprintf("WALPOST_POSTGRES_URL=postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/%s?sslmode=disable&target_session_attrs=read-write",
				primary.Port(), second, r.db)
		}
		r.env = append(r.env, either(standby.Port()))
		r.start()

		failover := []string{"failover", "--yes", "--for", "4s", "--json", "--standby", at, "--stop"}
		t.Run("another system", func(t *testing.T) {
			other := testenv.NewPostgres(t, testenv.PGOptions{})
			_, err := other.CreateDB(t.Context(), r.db)
			r.must(err)
			env := r.env
			defer func() { r.env = env }()
			r.env = append(env[:len(env):len(env)], either(other.Port()))
			foreign := strings.Replace(at, fmt.Sprint(standby.Port()), fmt.Sprint(other.Port()), 1)
			r.refuses(1, "is no standby", "failover", "--yes", "--standby", foreign, "--stop", "true")
		})
		t.Run("the primary goes on", func(t *testing.T) {
			o := r.await(r.begin(append(failover, "true")...))
			if o.code != 1 || !strings.Contains(o.stderr, "the primary still answers after --stop: nothing was promoted") || o.Failover != nil || o.Events.Lost > 0 {
				t.Errorf("exit code %d, %q, report %+v", o.code, o.stderr, o.Report)
			}
		})
		command, stopped := r.commandOf(func(ctx context.Context) error { return primary.Stop(ctx, testenv.Fast) })
		o := r.await(r.begin(append(failover, command)...))
		r.must(<-stopped)
		r.pg = standby
		if o.code != 0 || !o.OK || o.Failover == nil || o.Failover.Lost+o.Failover.Phantoms != 0 || o.Phantoms != 0 || o.Again == nil || o.Events.Stored < 50 {
			t.Errorf("exit code %d, report %+v", o.code, o.Report)
		}
		if c := r.compare(); !c.Exact() {
			t.Errorf("counted: %s", c.String())
		}
	})
}

// eventually waits until a query says true.
func (r *rig) eventually(what, sql string) {
	r.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); r.query(sql) != "true"; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			r.t.Fatal("waited in vain: " + what)
		}
	}
}
