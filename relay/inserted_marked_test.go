package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/verify"
)

// insertMarkedSQL inserts rows as a role with INSERT on every column can.
const insertMarkedSQL = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at, last_error)
	SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n), now(), $3 FROM generate_series($1::int, $2::int) n ORDER BY n`

// TestRowsInsertedAsMarked: they are nothing to deliver, and no later start takes them for lost: those
// that the relay read in the WAL, and those that were inserted while none ran. What the stream did lose
// is lost all the same.
func TestRowsInsertedAsMarked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 10)
	r.exec(insertMarkedSQL, 11, 20, nil)
	r.pending(0)
	r.passes(r.here())
	x.alarmed("inserted_marked")
	r.finds(r.verify(), map[verify.Kind]int64{})
	x.halt()

	x = r.start().streaming()
	x.quiet("inserted_marked") // it was said
	r.put(21, 25)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 10, 21, 25)
	x.quietBut()
	x.halt()

	r.launch().awaitState("streaming").kill() // one that stops has marked nothing later
	r.exec(insertMarkedSQL, 26, 35, "an old failure")
	r.loseMessages(5, 14)
	x = r.start().streaming()
	a := x.alarmed("events_lost")
	if a["rows"] != int64(2) {
		t.Errorf("alarm %v, want rows 2", a)
	}
	if a := x.alarmed("inserted_marked"); a["rows"] != int64(10) {
		t.Errorf("alarm %v, want rows 10", a)
	}
	r.put(36, 40)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 4, 6, 10, 21, 23, 25, 25, 5, 5, 24, 24, 36, 40)
	x.quietBut("events_lost")
	if n := r.query1(`SELECT count(*) FROM outbox_messages WHERE last_error LIKE 'skipped: inserted as processed%'`); n != "20" {
		t.Errorf("%s rows say that they were inserted as processed, want 20", n)
	}
}

// TestInsertedMarkIsLocked: a start that finds a row inserted as processed, and cannot note it, goes on all
// the same. The WAL up to it is confirmed when it is noted.
func TestInsertedMarkIsLocked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	r.exec(insertMarkedSQL, 11, 11, nil)
	inserted := r.here()
	holder := r.conn()
	r.must(run(t.Context(), holder, "BEGIN; SELECT FROM outbox_messages WHERE payload ->> 'n' = '11' FOR UPDATE"))
	x = r.start().streaming()
	x.alarmed("inserted_marked")
	r.put(12, 15)
	r.pending(0)
	r.pinned(inserted)
	r.must(run(t.Context(), holder, "COMMIT"))
	r.passes(r.here())
	r.storedIs(1, 10, 12, 15)
	x.quiet("events_lost")
}

// TestMarkedAgainIsNoInsertedMark: a row that was inserted as marked, and that an operator has had
// delivered, can be lost.
func TestMarkedAgainIsNoInsertedMark(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = moveWindow })
	r.cfg.FallbackInterval = 100 * time.Millisecond
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.keep()
	r.exec(insertMarkedSQL, 4, 4, nil)
	r.passes(r.here())
	r.exec(`UPDATE outbox_messages SET processed_at = NULL, last_error = NULL, available_at = now() WHERE last_error LIKE 'skipped: %'`)
	r.pending(0)
	x.halt()
	r.rewind()
	r.loseMessages(4)
	r.duplicateWindowPasses(moveWindow)
	x = r.start().streaming()
	x.alarmed("events_lost")
	r.put(5, 5)
	r.pending(0)
	r.passes(r.here()) // its INSERT came again, and its mark is another one by now
	r.storedIs(1, 5)
	if n := r.query1(`SELECT count(*) FROM outbox_messages WHERE last_error LIKE 'skipped: %'`); n != "0" {
		t.Error("the delivered row says that it was inserted as processed: its next loss would not be noticed")
	}
}

// TestOutboxPartitionedByItsMark: a mark moves the row, and to the WAL that is an INSERT.
func TestOutboxPartitionedByItsMark(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.exec(`ALTER TABLE outbox_messages RENAME TO old_outbox;
			CREATE TABLE outbox_messages (LIKE old_outbox INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY RANGE (processed_at);
			CREATE TABLE outbox_pending PARTITION OF outbox_messages DEFAULT;
			CREATE TABLE outbox_done PARTITION OF outbox_messages FOR VALUES FROM ('2000-01-01') TO ('2100-01-01');
			CREATE INDEX ON outbox_messages (id); CREATE INDEX ON outbox_messages (processed_at);
			ALTER TABLE outbox_pending REPLICA IDENTITY FULL; ALTER TABLE outbox_done REPLICA IDENTITY FULL;
			DROP PUBLICATION IF EXISTS walpost; DROP TABLE old_outbox`)
		x := r.start().streaming()
		r.put(1, 10)
		r.pending(0)
		r.put(11, 20) // behind the marks of the others
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, 20)
		x.quietBut()
		x.quiet("inserted_marked")
	})
}
