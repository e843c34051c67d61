package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// swapSQL is how an outbox is partitioned: the new table takes the old one's name, and no
// publication has it.
const swapSQL = `BEGIN; ALTER TABLE outbox_messages RENAME TO outbox_messages_old;
	CREATE TABLE outbox_messages (LIKE outbox_messages_old INCLUDING ALL); COMMIT`

// putNone commits one event that only the WAL has.
func (r *rig) putNone(n int) {
	r.t.Helper()
	r.exec(set(nil).insert("outbox_messages", n, canonicalRow) + "; DELETE FROM outbox_messages")
}

// TestSwappedTableIsNotConfirmed: with mark none the WAL is all there is. What a table that
// no publication has brings is not confirmed, so that it can be read from the slot, and an
// alarm says so.
func TestSwappedTableIsNotConfirmed(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.Outboxes[0].Mark = outbox.MarkNone
		x := r.start().streaming()
		r.putNone(1)
		r.passes(r.here())
		r.exec(swapSQL)
		before := r.here()
		for n := 2; n <= 10; n++ {
			r.putNone(n)
		}
		after := r.here()
		r.exec(`SELECT pg_logical_emit_message(true, 'noise', repeat('x', 100000)) FROM generate_series(1, 50)`)
		a := x.alarmed("unpublished")
		t.Logf("alarm: %v", a)
		r.pinned(before)
		r.exec(`ALTER PUBLICATION walpost ADD TABLE outbox_messages`)
		r.putNone(11)
		eventually(t, "the next event is stored", func() bool { return r.storedCount() == 2 })
		r.pinned(after)
		// The slot's WAL has them all.
		r.exec(`SELECT pg_copy_logical_replication_slot($1, $2, false, 'test_decoding')`, r.cfg.Slot, r.cfg.Slot+"_rescue")
		t.Cleanup(func() { r.dropSlot(r.cfg.Slot + "_rescue") })
		if n := r.query1(`SELECT count(*) FROM pg_logical_slot_peek_changes($1, NULL, NULL) WHERE data LIKE 'table public.outbox_messages: INSERT:%'`, r.cfg.Slot+"_rescue"); n != "10" {
			t.Errorf("the slot's WAL has %s rows, want 10", n)
		}
		// A restart is the operator's word that the rows are found.
		x.halt()
		r.start().streaming()
		r.passes(after)
		if got := r.numbers(); len(got) != 2 || got[1] != 11 {
			t.Errorf("stored %v, want 1 and 11", got)
		}
	})
}

// TestPublicationChangesUnderTheRelay: whatever may have kept a row from the WAL is noticed, and
// nothing else is.
func TestPublicationChangesUnderTheRelay(t *testing.T) {
	t.Parallel()
	const create = `CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert', publish_via_partition_root = true)`
	const rename = `ALTER TABLE outbox_messages RENAME TO outbox_messages_old`
	const like = `CREATE TABLE outbox_messages (LIKE outbox_messages_old INCLUDING ALL)`
	changes := map[string]struct {
		sql string
		gap bool
	}{
		"dropped from it":          {`ALTER PUBLICATION walpost SET TABLE outbox_messages_dlq`, true},
		"without inserts":          {`ALTER PUBLICATION walpost SET (publish = 'update')`, true},
		"without inserts a moment": {`ALTER PUBLICATION walpost SET (publish = 'update'); ALTER PUBLICATION walpost SET (publish = 'insert')`, true},
		"filtered":                 {`ALTER PUBLICATION walpost SET TABLE outbox_messages WHERE (id > 1000000)`, true},
		"recreated":                {`DROP PUBLICATION walpost; ` + create, true},
		"gone":                     {`DROP PUBLICATION walpost`, true},
		"swapped, added later":     {`BEGIN; ` + rename + `; ` + like + `; COMMIT; ALTER PUBLICATION walpost ADD TABLE outbox_messages`, true},
		"dropped and recreated":    {rename + `; ` + like + `; DROP TABLE outbox_messages_old`, true},
		"added with a change":      {`BEGIN; ALTER PUBLICATION walpost DROP TABLE outbox_messages; COMMIT; BEGIN; ALTER PUBLICATION walpost ADD TABLE outbox_messages; ALTER TABLE outbox_messages SET (fillfactor = 90); COMMIT`, true},
		"swapped at once":          {`BEGIN; ` + rename + `; ` + like + `; ALTER PUBLICATION walpost ADD TABLE outbox_messages; COMMIT`, false},
		"another one beside it":    {`ALTER PUBLICATION walpost ADD TABLE outbox_messages_dlq`, false},
		"altered":                  {`ALTER TABLE outbox_messages ADD COLUMN more TEXT; CREATE INDEX ON outbox_messages (more); TRUNCATE outbox_messages`, false},
	}
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
		for name, change := range changes {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				r := newRigWith(t, pg, n)
				r.cfg.Outboxes[0].Mark = outbox.MarkNone
				r.cfg.Stream.Name, r.cfg.Subject = strings.ToUpper(r.cfg.Slot), r.cfg.Slot+".{event_type}"
				x := r.start().streaming()
				for _, sql := range strings.SplitAfter(change.sql, "COMMIT;") {
					r.exec(sql)
				}
				after := r.here()
				if change.gap {
					x.alarmed("unpublished")
					if r.confirmedPast(after) {
						t.Error("the LSN is confirmed past the change")
					}
				} else {
					r.passes(after)
					x.quiet("unpublished")
				}
				x.halt()
			})
		}
	})
}

// TestSwappedTableIsDelivered: where the table has the rows, they come from there, late, and an
// alarm says what is wrong with the publication.
func TestSwappedTableIsDelivered(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 500 * time.Millisecond
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.exec(swapSQL)
	r.put(4, 10)
	r.pending(0)
	r.storedIs(1, 10)
	x.alarmed("missed_rows")
	if a := x.alarmed("unpublished"); !contains(a["hint"], "ADD TABLE") {
		t.Errorf("the alarm says no remedy: %v", a)
	}
	r.exec(`ALTER PUBLICATION walpost ADD TABLE outbox_messages`)
	x.over("unpublished")
	r.put(11, 12)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 12)
}

// TestTableUnfit: a column that the layout maps is dropped under a running relay. An alarm names
// it, and the relay goes on when it is there again.
func TestTableUnfit(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 500 * time.Millisecond
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.exec(`ALTER TABLE outbox_messages DROP COLUMN trace_id`)
	if a := x.alarmed("table_unfit"); !contains(a["error"], "trace_id") {
		t.Errorf("the alarm does not name the column: %v", a)
	}
	r.put(4, 6)
	r.exec(`ALTER TABLE outbox_messages ADD COLUMN trace_id TEXT`)
	r.put(7, 9)
	r.pending(0)
	r.storedIs(1, 9)
	x.over("table_unfit")
}

// TestTableRenamed: a table is renamed under a running relay, and gets its name back.
func TestTableRenamed(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 500 * time.Millisecond
	r.addSecond()
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.exec(`ALTER TABLE outbox_messages RENAME TO elsewhere`)
	for _, name := range []string{"table_unfit", "unpublished"} {
		if a := x.alarmed(name); !contains(a["error"], "does not exist") || contains(a["hint"], "ADD TABLE") {
			t.Errorf("the alarm does not say that the table is gone: %v", a)
		}
	}
	r.putSecond(11, 13)
	r.exec(`ALTER TABLE elsewhere RENAME TO outbox_messages`)
	r.put(4, 6)
	r.pending(0)
	r.storedIs(1, 3, 11, 13, 4, 6)
	x.quiet("slot_given_up", "no_progress")
}
