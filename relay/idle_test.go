package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// A database in which nothing happens, next to a busy one: the WAL is the
// server's, so the slot has to follow what the other database writes, or it
// would keep it for ever.
func TestIdleDatabase(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		x := r.start().streaming()
		busy := *r
		busy.url = pg.NewDB(t)
		busy.exec(`CREATE TABLE busy (n int, filler text)`)
		restart := r.slotLSN("restart_lsn")
		for range 3 {
			busy.exec(`INSERT INTO busy SELECT g, repeat('x', 100) FROM generate_series(1, 20000) g`)
			end := r.here()
			r.passes(end)
			// The oldest WAL that is kept moves on with a checkpoint, when the relay has confirmed what it wrote.
			eventually(t, "restart_lsn moves on", func() bool {
				r.exec(`CHECKPOINT`)
				return r.query1(`SELECT restart_lsn >= $1::pg_lsn FROM pg_replication_slots WHERE slot_name = $2`, end, r.cfg.Slot) == "true"
			})
		}
		t.Logf("restart_lsn went from %s to %s", restart, r.slotLSN("restart_lsn"))
		if n := r.storedCount(); n != 0 {
			t.Errorf("the stream holds %d messages, want none", n)
		}
		x.halt()
		r.must(x.err)
	})
}

// slotLSN is an LSN of the relay's slot.
func (r *rig) slotLSN(column string) string {
	r.t.Helper()
	return r.query1(`SELECT `+column+`::text FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
}
