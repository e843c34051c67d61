package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// refuseNotesSQL has each start of a session fail.
const refuseNotesSQL = `CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'refused'; END $$;
	CREATE TRIGGER refuse BEFORE UPDATE ON outbox_sent FOR EACH ROW EXECUTE FUNCTION refuse()`

// TestNoProgress: every start fails at the same step, and somebody hears of it. When the cause is gone
// the relay goes on.
func TestNoProgress(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	x.quiet("no_progress")
	r.exec(refuseNotesSQL)
	r.exec(`SELECT pg_terminate_backend(l.pid) FROM pg_locks l JOIN pg_database d ON d.oid = l.database
		WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND d.datname = current_database()`)
	a := x.alarmed("no_progress")
	if a["step"] == "" || a["error"] == "" {
		t.Errorf("the alarm says %v, want a step and an error", a)
	}
	r.exec(`DROP TRIGGER refuse ON outbox_sent`)
	r.put(11, 20)
	r.pending(0)
	r.storedIs(1, 20)
}

// TestComparisonIsBounded: more rows carry a late mark than are kept to be compared, as where
// somebody has set many.
func TestComparisonIsBounded(t *testing.T) {
	reset := relay.SetMostCompared(20)
	defer reset()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	x.halt()
	x = r.start().streaming()
	defer x.halt()
	x.alarmed("comparison_given_up")
	r.put(41, 50)
	r.pending(0)
	r.storedIs(1, 50)
	x.quietBut()
}

// TestScanIsBounded: of rows that were changed, or cannot be marked, no more are kept than of those that are compared.
func TestScanIsBounded(t *testing.T) {
	reset := relay.SetMostCompared(20)
	defer reset()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 40)
	r.pending(0)
	x.halt()
	r.exec(`UPDATE outbox_messages SET payload = payload || '{"more": 1}' WHERE (payload ->> 'n')::int <= 30`)
	x = r.start().streaming()
	x.alarmed("comparison_given_up")
	x.halt()
	r.exec(`UPDATE outbox_messages SET payload = payload - 'more', processed_at = NULL`)
	taker := r.conn()
	r.must(run(t.Context(), taker, "BEGIN"))
	r.must(run(t.Context(), taker, "SELECT FROM outbox_messages FOR UPDATE"))
	x = r.start()
	defer x.halt()
	x.alarmed("no_progress")
	r.must(run(t.Context(), taker, "COMMIT"))
	r.put(41, 50)
	r.pending(0)
	r.storedIs(1, 50)
}

// TestMarkOfLongAgo: a mark from before its message was stored does not have everything since then read
// and compared.
func TestMarkOfLongAgo(t *testing.T) {
	reset := relay.SetMostCompared(jetstream.U + 2000)
	defer reset()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 3000)
	r.pending(0)
	r.put(3001, jetstream.U+3000)
	r.pending(0)
	x.halt()
	r.exec(`UPDATE outbox_messages SET processed_at = '2020-01-01' WHERE payload ->> 'n' = '5000'`)
	x = r.start().streaming()
	defer x.halt()
	r.put(1, 1)
	r.pending(0)
	x.quiet("comparison_given_up")
	x.quietBut()
}
