package badinput

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestBadCluster has what is wrong with a whole server: one cluster, restarted
// with another configuration each time.
func TestBadCluster(t *testing.T) {
	t.Parallel()
	settings := map[string]string{"wal_level": "replica", "max_replication_slots": "1"}
	s := newSite(t, testenv.NewPostgres(t, testenv.PGOptions{Settings: settings}))
	standby := s.pg.NewStandby(t, "standby", nil)
	run(t, s, []badStart{
		{name: "standby", env: map[string]string{"WALPOST_POSTGRES_URL": standby.URL(ready)}},
		{name: "wal_level", env: map[string]string{"WALPOST_MODE": "stream"}},
	})
	s.must(standby.Close())

	s.restart(map[string]string{"wal_level": "logical"})
	run(t, s, []badStart{{name: "no_free_slot"}})

	s.must(s.pg.Exec(t.Context(), "postgres", `SELECT pg_drop_replication_slot('standby')`))
	s.restart(map[string]string{"max_wal_senders": "0"})
	run(t, s, []badStart{{name: "no_walsenders", env: map[string]string{"WALPOST_MODE": "stream"}}})
}

func (s *site) restart(settings map[string]string) {
	s.t.Helper()
	s.must(s.pg.Reload(s.t.Context(), settings))
	s.must(s.pg.Restart(s.t.Context()))
}
