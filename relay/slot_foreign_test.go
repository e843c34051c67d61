package relay_test

import (
	"fmt"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// unread counts the changes of another program's slot.
func (r *rig) unread(slot string) string {
	r.t.Helper()
	return r.query1(`SELECT count(*) FROM pg_logical_slot_peek_changes($1, NULL, NULL)`, slot)
}

// TestForeignSlotAtStart: a start that finds another program's slot under its name, or under the name
// that it makes its own from, refuses and leaves it as it was.
func TestForeignSlotAtStart(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ name, suffix, args string }{
		{"another plugin", "", "'test_decoding'"},
		{"two_phase", "", "'pgoutput', false, true"},
		{"another plugin under the new name", "_new", "'test_decoding'"},
		{"pgoutput under the new name", "_new", "'pgoutput'"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			slot := r.cfg.Slot + c.suffix
			r.exec(fmt.Sprintf(`SELECT pg_create_logical_replication_slot('%s', %s)`, slot, c.args))
			t.Cleanup(func() { r.dropSlot(slot) })
			r.put(1, 3)
			state := `SELECT concat_ws(' ', plugin, two_phase, restart_lsn, confirmed_flush_lsn) FROM pg_replication_slots WHERE slot_name = $1`
			before := r.query1(state, slot)
			x := r.start()
			x.ends()
			if !contains(fmt.Sprint(x.err), "belongs to another program") {
				t.Errorf("the relay ended with: %v", x.err)
			}
			if after := r.query1(state, slot); after != before {
				t.Errorf("the slot was %q, and is %q", before, after)
			}
		})
	}
}

// TestForeignSlotWhileRunning: another program takes the name under a running relay. Its slot and its
// unread changes are left alone, the table delivers meanwhile, and the relay makes its own slot when the
// name is free.
func TestForeignSlotWhileRunning(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		x := r.start().streaming()
		r.put(1, 10)
		r.pending(0)
		r.withoutRelay("the slot is another program's", fmt.Sprintf(`DO $$ BEGIN
			PERFORM pg_drop_replication_slot('%[1]s'); PERFORM pg_create_logical_replication_slot('%[1]s', 'test_decoding'); END $$`, r.cfg.Slot))
		r.put(11, 20)
		changes := r.unread(r.cfg.Slot)
		x.alarmed("slot_foreign")
		r.pending(0)
		x.alarmed("slot_not_made")
		if n := r.unread(r.cfg.Slot); changes == "0" || len(n) < len(changes) {
			t.Errorf("the other program has %s changes to read, had %s", n, changes)
		}
		r.exec(`SELECT pg_drop_replication_slot($1)`, r.cfg.Slot)
		x.streaming()
		r.put(21, 30)
		r.pending(0)
		r.storedIs(1, 30)
		x.halt()
	})
}

// TestForeignSlotWhilePolling: a relay that polls drops the slot that it has left, and no other program's.
func TestForeignSlotWhilePolling(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 3) // messages from the WAL: without them no slot is dropped
	r.pending(0)
	x.halt()
	r.dropSlot(r.cfg.Slot)
	r.cfg.Mode = "poll"
	x = r.start()
	eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
	r.exec(`SELECT pg_create_logical_replication_slot($1, 'test_decoding')`, r.cfg.Slot)
	r.exec(`SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
	r.put(4, 6)
	r.pending(0) // by a session that began behind the termination
	if n := r.unread(r.cfg.Slot); n == "0" {
		t.Error("the other program has lost its changes")
	}
}

// TestAdoptedSlotIsSaid: an idle pgoutput slot that nothing shows to be the relay's is used, and the log
// says so once, with the position that it is read from.
func TestAdoptedSlotIsSaid(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, r.cfg.Slot)
	confirmed := r.query1(`SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
	adopted := func(x *running) int {
		n := 0
		for _, e := range x.logs.All() {
			if contains(e.Message, "slot that is there already") && contains(e.ContextMap()["confirmed_lsn"], confirmed) {
				n++
			}
		}
		return n
	}
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	if n := adopted(x); n != 1 {
		t.Errorf("the log says %d times that the slot is taken over, want once", n)
	}
	x.halt()
	x = r.start().streaming()
	r.put(4, 6)
	r.pending(0)
	if n := adopted(x); n != 0 {
		t.Error("the log says that the relay's own slot is another program's")
	}
	r.storedIs(1, 6)
}

// TestPollingLeavesASlotThatItNeverStreamed: it may be another program's, also when the relay's own marks
// and messages are there. One that it has streamed is dropped.
func TestPollingLeavesASlotThatItNeverStreamed(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`SELECT pg_create_logical_replication_slot($1, 'pgoutput')`, r.cfg.Slot)
	polls := func(from, to int) *running {
		r.cfg.Mode = relay.ModePoll
		x := r.start()
		r.put(from, to)
		r.pending(0)
		return x
	}
	has := func() bool {
		return r.query1(`SELECT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = $1)`, r.cfg.Slot) == "true"
	}
	for n := range 2 {
		x := polls(2*n+1, 2*n+2)
		x.alarmed("slot_left")
		x.halt()
		if !has() {
			t.Fatal("the slot was dropped")
		}
	}
	r.cfg.Mode = relay.ModeAuto
	x := r.start().streaming()
	r.put(5, 6)
	r.pending(0)
	x.halt()
	x = polls(7, 8)
	x.quiet("slot_left")
	if has() {
		t.Error("the slot stayed")
	}
	r.storedIs(1, 8)
}
