package relay_test

import (
	"fmt"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestStaleVerdictOnASlot: a relay that found its slot unusable, and lost its place before it
// could do anything about it, leaves the slot alone that another one has made since.
func TestStaleVerdictOnASlot(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	a := r.start().streaming()
	b := r.start()
	eventually(t, "B stands by", func() bool { return b.Status().State == "standby" })
	c := r.conn()
	name := r.query1(`SELECT current_database()::text`)
	put := func(from, to int) {
		r.must(run(t.Context(), c, fmt.Sprintf(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n) FROM generate_series(%d, %d) n`, from, to)))
	}
	connections := func(allowed bool) {
		r.must(r.pg.Exec(t.Context(), "postgres", fmt.Sprintf(`ALTER DATABASE "%s" ALLOW_CONNECTIONS %t`, name, allowed)))
	}
	connections(false) // or: none is free
	r.must(run(t.Context(), c, `BEGIN; ALTER TABLE outbox_messages RENAME trace_id TO trace_id2`))
	put(1000, 1000)
	r.must(run(t.Context(), c, `DELETE FROM outbox_messages; ALTER TABLE outbox_messages RENAME trace_id2 TO trace_id; COMMIT`))
	eventually(t, "A sees it", func() bool { return a.alarm("undecodable") != nil })
	r.must(run(t.Context(), c, `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted
		AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))
	eventually(t, "B has the lock", func() bool { return b.Status().State != "standby" })
	connections(true)
	b.streaming()
	eventually(t, "A stands by", func() bool { return a.Status().State == "standby" })
	put(1, 10)
	eventually(t, "they are stored", func() bool { return r.storedCount() == 10 })
	r.must(r.nats.Pause())
	put(11, 20)
	b.halt()
	eventually(t, "A is active", func() bool { return a.Status().State != "standby" })
	r.must(r.nats.Resume())
	a.streaming()
	put(21, 30)
	eventually(t, "they are stored", func() bool { n := r.numbers(); return len(n) > 0 && n[len(n)-1] == 30 })
	r.storedIs(1, 30)
	a.quiet("slot_given_up")
}
