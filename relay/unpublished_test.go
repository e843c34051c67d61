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

// TestPublicationChangesUnderTheRelay: what keeps rows from the WAL is noticed, a change that keeps none is not,
// and the table delivers what the WAL does not bring.
func TestPublicationChangesUnderTheRelay(t *testing.T) {
	t.Parallel()
	type alarms int
	const (
		none   alarms = iota
		passes        // it is over before somebody looks, mostly
		lasts
	)
	const create = `CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert', publish_via_partition_root = true)`
	const rename = `ALTER TABLE outbox_messages RENAME TO outbox_messages_old`
	const like = `CREATE TABLE outbox_messages (LIKE outbox_messages_old INCLUDING ALL)`
	changes := map[string]struct {
		sql  string
		says alarms
	}{
		"dropped from it":          {`ALTER PUBLICATION walpost SET TABLE outbox_messages_dlq`, lasts},
		"without inserts":          {`ALTER PUBLICATION walpost SET (publish = 'update')`, lasts},
		"without inserts a moment": {`ALTER PUBLICATION walpost SET (publish = 'update'); ALTER PUBLICATION walpost SET (publish = 'insert')`, passes},
		"filtered":                 {`ALTER PUBLICATION walpost SET TABLE outbox_messages WHERE (id > 1000000)`, lasts},
		"recreated":                {`DROP PUBLICATION walpost; ` + create, passes},
		"gone":                     {`DROP PUBLICATION walpost`, passes}, // the relay makes it again
		"swapped, added later":     {`BEGIN; ` + rename + `; ` + like + `; COMMIT; ALTER PUBLICATION walpost ADD TABLE outbox_messages`, passes},
		"dropped and recreated":    {rename + `; ` + like + `; DROP TABLE outbox_messages_old`, lasts},
		"added with a change":      {`BEGIN; ALTER PUBLICATION walpost DROP TABLE outbox_messages; COMMIT; BEGIN; ALTER PUBLICATION walpost ADD TABLE outbox_messages; ALTER TABLE outbox_messages SET (fillfactor = 90); COMMIT`, passes},
		"swapped at once":          {`BEGIN; ` + rename + `; ` + like + `; ALTER PUBLICATION walpost ADD TABLE outbox_messages; COMMIT`, none},
		"another one beside it":    {`ALTER PUBLICATION walpost ADD TABLE outbox_messages_dlq`, none},
		"altered":                  {`ALTER TABLE outbox_messages ADD COLUMN more TEXT; CREATE INDEX ON outbox_messages (more); TRUNCATE outbox_messages`, none},
	}
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
		for name, change := range changes {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				r := newRigWith(t, pg, n)
				r.cfg.FallbackInterval = 500 * time.Millisecond
				r.cfg.Stream.Name, r.cfg.Subject = strings.ToUpper(r.cfg.Slot), r.cfg.Slot+".{event_type}"
				x := r.start().streaming()
				for _, sql := range strings.SplitAfter(change.sql, "COMMIT;") {
					r.exec(sql)
				}
				r.put(1, 3)
				r.pending(0)
				if change.says == lasts {
					x.alarmed("unpublished")
				}
				r.passes(r.here())
				stream, err := r.js().Stream(t.Context(), r.cfg.Stream.Name)
				r.must(err)
				if n := stream.CachedInfo().State.Msgs; n != 3 {
					t.Errorf("%d messages are stored, want 3", n)
				}
				if change.says == none {
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

// TestPublicationLosesItsFilter: a publication brings rows that are not the relay's, or only others than its own. None of
// these is stored, and its own rows are delivered, under the relay that runs and by one that starts.
func TestPublicationLosesItsFilter(t *testing.T) {
	t.Parallel()
	const placed, failed, all = `WHERE (event_type = 'order.placed')`, `WHERE (event_type = 'order.failed')`, ``
	for name, filter := range map[string]string{"none": all, "another": failed} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.FallbackInterval = 500 * time.Millisecond
			r.cfg.Outboxes[0].Where = `event_type = 'order.placed'`
			n := 0
			put := func() {
				t.Helper()
				r.put(n+1, n+3)
				r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
					SELECT 'order', 9, 'order.failed', jsonb_build_object('n', -n) FROM generate_series($1::int, $2::int) n`, n+1, n+3)
				n += 3
			}
			filtered := func(filter string) {
				r.exec(`ALTER PUBLICATION ` + r.cfg.Publication + ` SET TABLE outbox_messages ` + filter)
			}
			x := r.start().streaming()
			put()
			r.pending(n)
			r.exec(`ALTER PUBLICATION ` + r.cfg.Publication + ` ADD TABLE outbox_messages_dlq`) // which changes nothing of this outbox
			put()
			r.pending(n)
			x.quiet("missed_rows", "unpublished")
			filtered(filter)
			for range 10 { // so long that the outbox would join
				put()
				r.pending(n)
			}
			x.alarmed("unpublished")
			r.passes(r.here())
			x.halt()
			put()
			x = r.start()
			x.alarmed("unpublished")
			put()
			r.pending(n)
			filtered(placed)
			x.over("unpublished")
			r.joined(1)
			x.streaming()
			put()
			r.pending(n)
			r.passes(r.here())
			r.storedIs(1, n)
			x.quietBut("unpublished", "missed_rows")
			x.halt()
		})
	}
}

// TestServerQuotesNames: the database has the server quote each name that it writes, also in conditions.
func TestServerQuotesNames(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	box := *r.cfg.Outboxes[0]
	box.Where = "event_type <> 'order.failed'"
	r.cfg.Outboxes = []*outbox.Table{&box}
	r.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET quote_all_identifiers = on', current_database()); END $$`)
	for i := range 2 {
		x := r.start().streaming()
		r.put(1+3*i, 3+3*i)
		r.pending(0)
		x.halt()
	}
	r.storedIs(1, 6)
}
