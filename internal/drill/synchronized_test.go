package drill_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/internal/testenv/pgbin"
)

// TestInheritedStandbySlots: a promoted server whose walsenders wait for a standby that it does not have is what a drill is
// to show.
func TestInheritedStandbySlots(t *testing.T) {
	t.Parallel()
	all, err := pgbin.All()
	if err != nil {
		t.Fatal(err)
	}
	newest := all[0]
	for _, b := range all {
		if b.Major > newest.Major {
			newest = b
		}
	}
	if newest.Major < 17 {
		t.Skip("synchronized_standby_slots came with PostgreSQL 17")
	}
	primary := testenv.NewPostgres(t, testenv.PGOptions{BinDir: newest.Dir})
	r := newRig(t, primary)
	r.walpost("migrate", "up")
	r.allow()
	slots := map[string]string{"synchronized_standby_slots": "sb"}
	standby := primary.NewStandby(t, "sb", map[string]string{"synchronized_standby_slots": "sb", "sync_replication_slots": "on"})
	r.must(primary.Reload(t.Context(), slots))
	r.eventually("the standby has the database", `SELECT coalesce((SELECT replay_lsn >= pg_current_wal_insert_lsn()
		FROM pg_stat_replication WHERE application_name = 'sb'), false)`)
	r.env = append(r.env, fmt.Sprintf("WALPOST_POSTGRES_URL=postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/%s?sslmode=disable&target_session_attrs=read-write",
		primary.Port(), standby.Port(), r.db))
	r.start()
	command, stopped := r.commandOf(func(ctx context.Context) error { return primary.Stop(ctx, testenv.Immediate) })
	// The tables deliver what is there when the relay begins on the promoted server: more has to come after that.
	o := r.drill("failover", "--for", "20s", "--patience", "6s", "--stop", command, "--standby",
		fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable", standby.Port(), r.db))
	r.must(<-stopped)
	r.pg = standby
	if o.code != 1 || o.Lost+o.Duplicated+o.Reordered != 0 || o.Failover == nil || o.Failover.Phantoms != 0 {
		t.Errorf("exit code %d, report %+v", o.code, o.Report)
	}
	if text := fmt.Sprint(o.Notes); !strings.Contains(text, `synchronized_standby_slots is "sb" on the promoted server`) {
		t.Errorf("notes %s", text)
	}
}
