package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestQueuedRowComesLate: a hold is about to end, a row of the WAL waits in its queue, and
// nothing but the session knows that. The session ends when rows behind it are stored. The
// next one brings the row after them, and its message says where it belongs.
func TestQueuedRowComesLate(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Retry = table.Retry{Backoff: 200 * time.Millisecond, MaxAttempts: 10_000}
	x := r.start().streaming()
	another := strings.Replace(putSQL, "1, $1", "2, $1", 1)
	r.exec(putSQL, "not a subject", 1, 1)
	r.exec(putSQL, "order.placed", 2, 2)
	eventually(t, "the second row waits for the first", func() bool { return r.count(heldRows) == 1 })

	// The first row is sent, and cannot be marked.
	marks := r.conn()
	r.must(run(t.Context(), marks, `SELECT pg_advisory_lock(7)`))
	r.exec(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(7); RETURN NEW; END $$`)
	r.exec(`CREATE TRIGGER slow BEFORE UPDATE ON outbox_messages FOR EACH ROW WHEN (NEW.processed_at IS NOT NULL) EXECUTE FUNCTION slow()`)
	r.exec(`UPDATE outbox_messages SET event_type = 'order.placed' WHERE event_type <> 'order.placed'`)
	stored := func(n uint64) func() bool { return func() bool { return r.storedCount() == n } }
	eventually(t, "the held rows are stored", stored(2))
	r.exec(putSQL, "order.placed", 3, 3)  // queues up
	r.exec(another, "order.placed", 4, 4) // does not
	eventually(t, "the other aggregate's row is stored", stored(3))
	r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid NOT IN (pg_backend_pid(), $1)`, marks.PgConn().PID())
	eventually(t, "the session has ended", func() bool { return x.metric("walpost_sessions_total") > 0 })
	r.must(run(t.Context(), marks, `SELECT pg_advisory_unlock(7)`))
	// The third row may be recorded as held meanwhile.
	eventually(t, "every row is marked", func() bool { return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == 0 })

	var got []string
	for _, m := range r.stored() {
		got = append(got, strings.TrimSpace(string(m.Data)+" "+m.Header.Get(jetstream.ViaHeader)))
		p, err := outbox.ParsePosition(m.Header.Get(jetstream.PositionHeader))
		r.must(err)
		if late := string(m.Data) == `{"n": 3}`; late == (m.Header.Get(jetstream.CommitHeader) == "") {
			t.Errorf("row %s at %s: the WAL has it at %q", m.Data, p, m.Header.Get(jetstream.CommitHeader))
		}
	}
	if got, want := strings.Join(got, ", "), `{"n": 1} poll, {"n": 2} poll, {"n": 4}, {"n": 3} poll`; got != want {
		t.Errorf("stored: %s, want %s", got, want)
	}
}
