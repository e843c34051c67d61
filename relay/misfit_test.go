package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// misfitSQL commits a row that lacks a column of the layout.
const misfitSQL = `ALTER TABLE outbox_messages DROP COLUMN trace_id;
	INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.placed', '{"n": 1000}');
	DELETE FROM outbox_messages;
	ALTER TABLE outbox_messages ADD COLUMN trace_id TEXT`

// TestMisfitWithoutATable: with mark none a row that the layout does not fit becomes a dead
// letter, with all that the WAL has of it, and the slot, the only copy of the others, stays.
func TestMisfitWithoutATable(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	r.cfg.Outboxes[0].Mark = outbox.MarkNone
	x := r.start().streaming()
	r.keep()
	x.halt()
	for n := 1; n <= 10; n++ {
		r.putNone(n)
	}
	r.exec(misfitSQL)
	for n := 11; n <= 15; n++ {
		r.putNone(n)
	}
	x = r.start().streaming()
	r.passes(r.here())
	r.storedIs(1, 15)
	const letter = `SELECT string_agg(concat_ws(' ', outbox, row_id = original ->> 'id', event_type, payload ->> 'n', original ->> 'aggregate_type', json_typeof(original -> 'processed_at')), ', ')
		FROM outbox_messages_dlq`
	const want = "public.outbox_messages t order.placed 1000 order null"
	if got := r.query1(letter); got != want {
		t.Errorf("dead letters: %s, want %s", got, want)
	}
	if a := x.alarmed("undecodable"); !contains(a["error"], "trace_id") {
		t.Errorf("the alarm does not name the column: %v", a)
	}
	// Under a running relay.
	r.exec(misfitSQL)
	r.putNone(16)
	r.passes(r.here())
	r.storedIs(1, 16)
	if got := r.query1(`SELECT count(*) FROM outbox_messages_dlq`); got != "2" {
		t.Errorf("%s dead letters, want 2", got)
	}
	x.halt()
	// What the WAL brings again is neither sent nor made a dead letter again.
	r.rewind()
	r.duplicateWindowPasses(100 * time.Millisecond)
	x = r.start().streaming()
	r.passes(r.here())
	r.storedIs(1, 16)
	if got := r.query1(`SELECT count(*) FROM outbox_messages_dlq`); got != "2" {
		t.Errorf("%s dead letters, want 2", got)
	}
	x.quiet("wal_lost", "slot_given_up")
}

// TestUnreadableSlotIsKept: with mark none a slot that cannot be read on is kept, whatever
// is in its way.
func TestUnreadableSlotIsKept(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.Outboxes[0].Mark = outbox.MarkNone
		x := r.start().streaming()
		r.putNone(1)
		r.passes(r.here())
		x.halt()
		before := r.here()
		r.putNone(2)
		r.exec(`DROP PUBLICATION walpost`)
		r.putNone(3)
		after := r.here()
		r.exec(`CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert', publish_via_partition_root = true)`)
		r.exec(`SELECT pg_logical_emit_message(true, 'noise', 'x')`)
		x = r.start()
		x.alarmed("slot_unreadable")
		r.storedIs(1, 2)
		if r.confirmedPast(after) {
			t.Error("the LSN is confirmed past a row that the server left out")
		}
		r.exec(`SELECT pg_copy_logical_replication_slot($1, $2, false, 'test_decoding')`, r.cfg.Slot, r.cfg.Slot+"_rescue")
		t.Cleanup(func() { r.dropSlot(r.cfg.Slot + "_rescue") })
		if n := r.query1(`SELECT count(*) FROM pg_logical_slot_peek_changes($1, NULL, NULL) WHERE lsn > $2::pg_lsn AND data LIKE 'table public.outbox_messages: INSERT:%'`,
			r.cfg.Slot+"_rescue", before); n == "0" {
			t.Error("the slot's WAL has none of the rows")
		}
		x.quiet("wal_lost", "slot_given_up")
		// An operator drops it, and the relay begins again, and says what that means.
		x.halt()
		r.dropSlot(r.cfg.Slot)
		x = r.start().streaming()
		x.alarmed("wal_lost")
		r.putNone(4)
		r.passes(r.here())
		if got := r.numbers(); len(got) != 3 || got[2] != 4 {
			t.Errorf("stored %v, want 1, 2 and 4", got)
		}
	})
}
