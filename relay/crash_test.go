package relay_test

import (
	"strconv"
	"syscall"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestMarksOutliveACrash: the server crashes when the slot is on its disk and
// nothing has flushed the WAL since the marks but the relay itself. A row that
// lies behind the confirmed LSN does not come again, so its mark, or the record
// of its failure, has to be there.
func TestMarksOutliveACrash(t *testing.T) {
	t.Parallel()
	quiet := map[string]string{"autovacuum": "off", "bgwriter_lru_maxpages": "0", "checkpoint_timeout": "1h"}
	testenv.ClustersWith(t, testenv.PGOptions{Settings: quiet}, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		x := r.start().streaming()
		r.put(1, 10)
		r.pending(0)
		row := func(n int, eventType string) string {
			return set{"event_type": "'" + eventType + "'"}.insert("outbox_messages", n, canonicalRow)
		}
		taker := r.seize(row(11, "order.placed") + ";" + row(12, "no subject"))
		eventually(t, "the row is stored and not marked", func() bool { return r.storedCount() == 11 })
		r.exec(`CHECKPOINT`) // whose snapshot of running transactions has the slot written to disk when it is confirmed
		after := r.here()
		r.stopWALWriter()
		r.must(run(t.Context(), taker, "COMMIT"))
		r.pending(0)
		r.passes(after)
		r.must(pg.Stop(t.Context(), testenv.Immediate))
		x.halt()
		r.must(pg.Start(t.Context()))
		if !r.confirmedPast(after) {
			t.Error("the crash took the confirmed LSN back: the test shows nothing")
		}
		if n := r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND last_error IS NULL`); n != "0" {
			t.Errorf("%s rows behind the confirmed LSN are pending after the crash", n)
		}
	})
}

// stopWALWriter leaves the WAL to be flushed by those who wait for it.
func (r *rig) stopWALWriter() {
	r.t.Helper()
	r.must(syscall.Kill(r.pid(`SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'`), syscall.SIGSTOP))
}

// pid is the process id that a query tells.
func (r *rig) pid(sql string, args ...any) int {
	r.t.Helper()
	pid, err := strconv.Atoi(r.query1(sql, args...))
	r.must(err)
	return pid
}
