package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/testenv"
)

// slotLoad goes on while slots are lost, and is what a relay keeps up with, race-instrumented too.
var slotLoad = load{writers: 4, rows: 20, pause: 100 * time.Millisecond}

// TestSlotIsDisposable takes the slot away under a running relay and a load, in
// every way there is. The relay makes another one, without a gap, a duplicate or
// a row out of its order.
func TestSlotIsDisposable(t *testing.T) {
	t.Parallel()
	testenv.ClustersWith(t, testenv.PGOptions{Settings: map[string]string{"max_slot_wal_keep_size": "128MB", "min_wal_size": "32MB", "max_wal_size": "128MB"}},
		func(t *testing.T, pg *testenv.Postgres) {
			t.Parallel()
			causes := []struct {
				name string
				lose func(r *rig)
				from int // the oldest version that can do it
			}{
				{"dropped", (*rig).loseByDrop, 0},
				{"too much WAL for the server", (*rig).loseByWAL, 0},
				{"idle for too long", (*rig).loseByIdling, 18},
			}
			for _, c := range causes {
				t.Run(c.name, func(t *testing.T) {
					if pg.Version() < c.from {
						t.Skipf("came with %d", c.from)
					}
					r := newRig(t, pg)
					l := newLedger(r)
					x := r.start().streaming()
					stop := l.start(slotLoad)
					for range 2 {
						before := r.storedCount()
						eventually(t, "events are stored", func() bool { return r.storedCount() > before+300 })
						made := x.metric("walpost_slots_created_total")
						c.lose(r)
						eventually(t, "there is another slot", func() bool { return x.metric("walpost_slots_created_total") > made })
						x.streaming()
						x.saysMadeAgain()
					}
					l.reaches(l.committed() + 300)
					stop()
					l.delivered()
					if n := x.metric("walpost_missed_rows_total"); n > 0 {
						t.Errorf("%v rows were missed", n)
					}
					if n := r.query1(`SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE '%_new'`); n != "0" {
						t.Errorf("%s unfinished slots are left", n)
					}
					x.halt()
				})
			}
		})
}

// saysMadeAgain: the log warns that a slot was lost, and how many rows came from the table.
func (x *running) saysMadeAgain() {
	x.rig.t.Helper()
	const gone = "the slot is gone: it is created again, and the tables deliver meanwhile"
	if x.logged(gone).Len() == 0 && x.alarm("slot_given_up") == nil {
		x.rig.t.Error("the log does not say that the slot was lost")
	}
	made := x.logged("created the slot again, and delivered the due rows that the old one had not brought").All()
	if len(made) == 0 || made[0].Level != zap.WarnLevel || made[0].ContextMap()["rows_from_tables"] == nil {
		x.rig.t.Errorf("the log says of the slot: %v", made)
	}
	if n := x.logged("created the slot, and delivered the due rows from before it").Len(); n != 1 {
		x.rig.t.Errorf("the slot was made for the first time %d times", n)
	}
}

// withoutRelay runs SQL about the slot while no walsender has it: it ends the
// relay's, again and again.
func (r *rig) withoutRelay(what, sql string, args ...any) {
	r.t.Helper()
	c := r.conn()
	eventually(r.t, what, func() bool {
		_, _ = c.Exec(r.t.Context(), `SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
		_, err := c.Exec(r.t.Context(), sql, args...)
		return err == nil
	})
}

func (r *rig) loseByDrop() {
	r.withoutRelay("the slot is dropped", `SELECT pg_drop_replication_slot($1)`, r.cfg.Slot)
}

// loseByWAL writes more WAL than the server keeps for a slot, while the relay
// cannot connect.
func (r *rig) loseByWAL() {
	r.t.Helper()
	r.locked(func() {
		c := r.conn()
		eventually(r.t, "the slot is lost", func() bool {
			r.must(run(r.t.Context(), c, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'walpost' AND datname = current_database()`))
			r.must(run(r.t.Context(), c, `SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000)) FROM generate_series(1, 40)`))
			r.must(run(r.t.Context(), c, `SELECT pg_switch_wal(); CHECKPOINT`))
			return r.query1(`SELECT coalesce((SELECT wal_status FROM pg_replication_slots WHERE slot_name = $1), 'none')`, r.cfg.Slot) == "lost"
		})
	})
}

func (r *rig) loseByIdling() {
	r.t.Helper()
	r.must(r.pg.Reload(r.t.Context(), map[string]string{"idle_replication_slot_timeout": "1s"}))
	defer func() { r.must(r.pg.Reload(r.t.Context(), map[string]string{"idle_replication_slot_timeout": "0"})) }()
	r.locked(func() {
		c := r.conn()
		eventually(r.t, "the slot is lost", func() bool {
			r.must(run(r.t.Context(), c, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'walpost' AND datname = current_database()`))
			time.Sleep(1200 * time.Millisecond)
			r.must(run(r.t.Context(), c, `CHECKPOINT`))
			return r.query1(`SELECT coalesce((SELECT wal_status FROM pg_replication_slots WHERE slot_name = $1), 'none')`, r.cfg.Slot) == "lost"
		})
	})
}

// locked keeps the relay from its place: the test has the lock.
func (r *rig) locked(f func()) {
	r.t.Helper()
	c := r.conn()
	eventually(r.t, "the lock is the test's", func() bool {
		r.must(run(r.t.Context(), c, `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid <> pg_backend_pid()
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))
		var ok bool
		r.must(c.QueryRow(r.t.Context(), `SELECT pg_try_advisory_lock(hashtextextended('walpost/' || $1, 0))`, r.cfg.Slot).Scan(&ok))
		return ok
	})
	f()
	r.must(run(r.t.Context(), c, `SELECT pg_advisory_unlock_all()`))
}

// TestSlotOverBudget: while JetStream is away the slot keeps WAL, and past its
// budget it is given up. The tables have the rows.
func TestSlotOverBudget(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newRigWith(t, testenv.SharedPostgres(t), n)
	r.cfg.MaxRetainedWAL = 100 << 20
	l := newLedger(r)
	x := r.start().streaming()
	stop := l.start(slotLoad)
	before := r.storedCount()
	eventually(t, "events are stored", func() bool { return r.storedCount() > before+200 })
	r.must(n.Kill())
	c := r.conn()
	eventually(t, "the slot is given up", func() bool {
		r.must(run(t.Context(), c, `SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000)) FROM generate_series(1, 10)`))
		return r.query1(`SELECT count(*) FROM pg_replication_slots WHERE slot_name LIKE $1 || '%'`, r.cfg.Slot) == "0"
	})
	x.alarmed("slot_given_up")
	r.must(n.Start(t.Context()))
	x.streaming()
	l.reaches(l.committed() + 300)
	stop()
	l.delivered()
	if n := x.metric("walpost_missed_rows_total"); n > 0 {
		t.Errorf("%v rows were missed", n)
	}
}

// TestBudgetWaitsForTheScan: a slot that keeps too much WAL while a session
// reads back is not given up before it can stream, again and again.
func TestBudgetWaitsForTheScan(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 8000)
	r.pending(0)
	x.halt()
	r.exec(`SELECT pg_logical_emit_message(false, 'filler', repeat('x', 1000000)) FROM generate_series(1, 20)`)
	r.put(8001, 8010)
	proxy := testenv.NewProxy(t, fmt.Sprintf("127.0.0.1:%d", r.nats.Port()))
	proxy.Slow(20 * time.Millisecond)
	r.cfg.NATS.URL = "nats://" + proxy.Addr()
	r.cfg.MaxRetainedWAL = 1 << 20
	begun := time.Now()
	r.start().streaming()
	if took := time.Since(begun); took < 2*time.Second {
		t.Fatalf("it read back within %s: the test shows nothing", took)
	}
	r.pending(0) // past the recovery LSN the slot may be given up
	r.storedIs(1, 8010)
}

// TestSlotAdvancedByHand: rows that the slot was moved past come from the table,
// late, counted and reported.
func TestSlotAdvancedByHand(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 500 * time.Millisecond
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	x.halt()
	r.put(11, 30)
	r.exec(`SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())`, r.cfg.Slot)
	x = r.start().streaming()
	r.pending(0)
	r.put(31, 40)
	r.pending(0)
	r.storedIs(1, 40)
	a := x.alarmed("missed_rows")
	if n := x.metric("walpost_missed_rows_total"); n != 20 || a["rows"] != int64(20) {
		t.Errorf("%v rows were missed, the alarm is %v, want 20", n, a)
	}
}

// TestSlotAdvancedUnderLoad: later rows of the same aggregates do not wait for
// the ones that nobody knows of, but each comes once.
func TestSlotAdvancedUnderLoad(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 500 * time.Millisecond
	l := newLedger(r)
	x := r.start().streaming()
	stop := l.start(slotLoad)
	l.reaches(600)
	x.halt()
	l.reaches(l.committed() + 600)
	least := r.unmarked()
	r.exec(`SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())`, r.cfg.Slot)
	most := r.unmarked()
	x = r.start().streaming()
	l.reaches(l.committed() + 600)
	stop()
	l.deliveredBut("account.moved")
	// A pass counts what it has found at its end, which one that is broken off does not reach.
	eventually(t, "missed rows are counted", func() bool { return x.metric("walpost_missed_rows_total") >= float64(least) })
	x.alarmed("missed_rows")
	x.halt()
	if n := x.metric("walpost_missed_rows_total"); n > float64(most) {
		t.Errorf("%v rows were missed, want %d to %d", n, least, most)
	}
}

// TestSlotCreationWaits: while an old transaction holds up the slot, the tables
// are polled, and the relay says whom it waits for.
func TestSlotCreationWaits(t *testing.T) {
	t.Parallel()
	testenv.ClustersWith(t, testenv.PGOptions{Settings: map[string]string{"max_prepared_transactions": "2"}}, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		for _, c := range []struct{ name, begin, end, names string }{
			{"a session", `BEGIN; INSERT INTO ledger VALUES (0)`, `COMMIT`, "application 'forgotten'"},
			{"a prepared transaction", `BEGIN; INSERT INTO ledger VALUES (0); PREPARE TRANSACTION 'stuck'`, `COMMIT PREPARED 'stuck'`, "prepared transaction 'stuck'"},
		} {
			t.Run(c.name, func(t *testing.T) {
				r := newRig(t, pg)
				newLedger(r)
				old := r.conn()
				r.must(run(t.Context(), old, `SET application_name = 'forgotten'`))
				r.must(run(t.Context(), old, c.begin))
				r.put(1, 5)
				x := r.start()
				eventually(t, "the rows are delivered meanwhile", func() bool { return r.storedCount() == 5 })
				eventually(t, "the relay says whom it waits for", func() bool {
					return x.logs.Filter(func(e observedEntry) bool { return contains(e.ContextMap()["for"], c.names) }).Len() > 0
				})
				if x.metric("walpost_slot_creation_wait_seconds") == 0 || x.metric("walpost_mode", "mode", "poll") != 1 || x.Ready() != nil {
					t.Errorf("while the slot is waited for: %+v", x.Status())
				}
				r.put(6, 9)
				eventually(t, "rows are delivered", func() bool { return r.storedCount() == 9 })
				r.must(run(t.Context(), old, c.end))
				x.streaming()
				r.put(10, 12)
				r.pending(0)
				r.storedIs(1, 12)
				x.halt()
			})
		}
	})
}

// TestSlotWaitsForARow: what keeps a new slot from having its name stands in the status
// while the tables are polled.
func TestSlotWaitsForARow(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.start().streaming().halt() // makes the publication
	r.dropSlot(r.cfg.Slot)
	r.put(1, 1)
	locked, err := r.conn().Begin(t.Context())
	r.must(err)
	defer locked.Rollback(t.Context())
	// No row can be locked to be sent, and no transaction keeps the slot from being created.
	_, err = locked.Exec(t.Context(), `LOCK TABLE outbox_messages IN EXCLUSIVE MODE`)
	r.must(err)
	x := r.start()
	eventually(t, "the status says for which row the slot waits", func() bool {
		s := x.Status()
		return s.State == "polling" && strings.Contains(s.Step, "waiting for row 1 of public.outbox_messages")
	})
	if err := x.Ready(); err != nil {
		t.Errorf("it polls, and is not ready: %v", err)
	}
	r.must(locked.Rollback(t.Context()))
	x.streaming()
	r.pending(0)
	if s := x.Status(); s.Step != "" {
		t.Errorf("it streams, and its step is %q", s.Step)
	}
}
