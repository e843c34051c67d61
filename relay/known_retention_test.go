package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// bound is the outbox as a relay knows it now.
func (n *named) bound() *outbox.Table {
	n.t.Helper()
	db, err := table.Open(n.t.Context(), table.Config{URL: n.url, Slot: n.cfg.Slot})
	n.must(err)
	defer db.Close()
	box := n.box
	n.must(db.Bind(n.t.Context(), &box))
	return &box
}

// retain makes a pass of retention, with the outbox as somebody knew it.
func (n *named) retain(box *outbox.Table, after time.Duration) {
	n.t.Helper()
	cfg := table.Config{URL: n.url, Slot: n.cfg.Slot}
	_, err := retention.Run(n.t.Context(), cfg, retention.Options{Tables: []*outbox.Table{box}, DeleteAfter: after})
	n.must(err)
}

// settled waits until the progress has come to an id, for the partitions that there are.
func (n *named) settled(id int) {
	n.t.Helper()
	eventually(n.t, fmt.Sprintf("the progress has come to id %d", id), func() bool {
		return n.count(`SELECT count(*) FROM outbox_known WHERE table_oid = 'outbox_messages'::regclass AND `+testenv.Settled+` = $1 AND partitions = `+testenv.PartitionsOf("outbox_messages"), id) == 1
	})
}

// TestRetentionOfAReplacedTable: a relay that has not noticed yet that its table was replaced makes a pass of retention. It takes
// no row of the other table, and no deferral of the first one.
func TestRetentionOfAReplacedTable(t *testing.T) {
	t.Parallel()
	n := newNamed(t, outbox.MarkJournal, relay.ModePoll)
	x := n.start().working(relay.ModePoll)
	n.add(50)
	n.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
		SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n), now() + interval '1 hour' FROM generate_series(111, 120) n`)
	n.delivered()
	n.settled(60)
	x.halt()
	before := n.bound()
	back := n.replace()
	n.add(60)
	n.retain(before, time.Microsecond)
	if rows, deferred := n.count(`SELECT count(*) FROM outbox_messages`), n.count(`SELECT count(*) FROM outbox_deferred`); rows != 60 || deferred != 10 {
		t.Errorf("%d rows and %d deferrals are left, want 60 and 10", rows, deferred)
	}
	x = n.start().working(relay.ModePoll)
	n.delivered()
	x.halt()
	back()
	n.exec(`UPDATE outbox_deferred SET available_at = now()`)
	n.start()
	n.next = 121
	n.delivered()
}

// partitioned has the outbox in two partitions, p1 with ids up to 40.
func (n *named) partitioned() { n.partitionedBy(`RANGE (id)`, range40, `id`) }

// range40 makes these partitions.
const range40 = `CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES FROM (1) TO (41);
	CREATE TABLE p2 PARTITION OF outbox_messages FOR VALUES FROM (41) TO (MAXVALUE)`

// partitionedBy makes the outbox a partitioned table.
func (n *named) partitionedBy(by, partitions, key string) {
	n.t.Helper()
	n.exec(`ALTER TABLE outbox_messages RENAME TO model; DROP TRIGGER outbox_no_update ON model; DROP TRIGGER outbox_no_truncate ON model;
		CREATE TABLE outbox_messages (LIKE model INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY ` + by + `; ` + partitions + `;
		ALTER TABLE outbox_messages ADD PRIMARY KEY (` + key + `); DROP TABLE model`)
	n.appendOnly()
}

const (
	detach = `ALTER TABLE outbox_messages DETACH PARTITION p1`
	attach = `ALTER TABLE outbox_messages ATTACH PARTITION p1 FOR VALUES FROM (1) TO (41)`
)

// TestAttachedPartitionIsKept: a partition with rows that nobody has delivered is attached when the progress has passed their
// ids. Retention drops it only when they are delivered.
func TestAttachedPartitionIsKept(t *testing.T) {
	t.Parallel()
	n := newNamed(t, outbox.MarkJournal, relay.ModePoll)
	n.partitioned()
	n.add(40)
	n.exec(detach)
	x := n.start().working(relay.ModePoll)
	n.add(10)
	eventually(t, "the other partition is delivered", func() bool { return n.storedCount() == 10 })
	n.settled(50)
	x.halt()
	n.exec(attach)
	n.retain(n.bound(), time.Hour)
	n.start()
	eventually(t, "its rows are delivered", func() bool { return n.storedCount() >= 50 })
	n.storedIs(41, 50, 1, 40)
}

// TestDetachedPartitionComesBack: a partition is detached while retention makes a pass, and attached again. Its rows were
// delivered, and are not delivered again.
func TestDetachedPartitionComesBack(t *testing.T) {
	t.Parallel()
	n := newNamed(t, outbox.MarkJournal, relay.ModePoll)
	n.partitioned()
	n.start().working(relay.ModePoll)
	n.add(40)
	n.delivered()
	n.settled(40)
	n.add(10)
	n.delivered()
	n.settled(50)
	n.exec(detach)
	n.settled(50)
	n.retain(n.bound(), time.Hour)
	n.exec(attach)
	n.settled(50)
	n.delivered()
}

// TestDeliveredRowsAreInsertedAgain: delivered rows are moved to a partition of their own, or were deleted and are put back by COPY, at
// once, or by and by, or when another session has begun.
func TestDeliveredRowsAreInsertedAgain(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]string{
		"moved": `DELETE FROM outbox_messages WHERE id <= 40; CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES FROM (1) TO (41);
			INSERT INTO outbox_messages OVERRIDING SYSTEM VALUE SELECT * FROM taken`,
		"put back": `DELETE FROM outbox_messages WHERE id <= 40; COMMIT; BEGIN; INSERT INTO outbox_messages OVERRIDING SYSTEM VALUE SELECT * FROM taken`,
	} {
		for _, when := range []string{"at once", "settled", "restarted"} {
			t.Run(name+"/"+when, func(t *testing.T) {
				t.Parallel()
				n := newNamed(t, outbox.MarkJournal, relay.ModeAuto)
				n.partitionedBy(`RANGE (id)`, `CREATE TABLE rest PARTITION OF outbox_messages DEFAULT`, `id`)
				x := n.start().working(relay.ModeAuto)
				n.add(5)
				n.delivered()
				// Some are due later: those are delivered from the table.
				n.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
					SELECT 'reminder', n, 'order.placed', json_build_object('n', n), clock_timestamp() + interval '1500 ms' FROM generate_series(6, 10) n`)
				n.next += 5
				n.delivered()
				n.add(40)
				n.delivered()
				switch when {
				case "settled":
					n.settled(50)
				case "restarted":
					x.halt()
					n.start().working(relay.ModeAuto)
				}
				n.exec(`BEGIN; CREATE TABLE taken AS SELECT * FROM outbox_messages WHERE id <= 40; ` + change + `; COMMIT`)
				n.add(10)
				n.delivered()
			})
		}
	}
}

// TestMissedRowsAreInsertedAgain: rows came with a partition, and were delivered from the table. They are put back while the session
// goes on.
func TestMissedRowsAreInsertedAgain(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			n := newNamed(t, outbox.MarkJournal, mode)
			n.partitionedBy(`LIST (tenant_id)`, `CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES IN (1); CREATE TABLE p2 PARTITION OF outbox_messages DEFAULT`, `id, tenant_id`)
			n.start().working(mode)
			n.add(5)
			n.delivered()
			n.exec(`ALTER TABLE outbox_messages DETACH PARTITION p1;
				INSERT INTO p1 (id, tenant_id, aggregate_type, aggregate_id, event_type, payload)
				SELECT nextval(pg_get_serial_sequence('outbox_messages', 'id')), 1, 'order', n, 'order.placed', jsonb_build_object('n', n) FROM generate_series(6, 25) n ORDER BY n;
				ALTER TABLE outbox_messages ATTACH PARTITION p1 FOR VALUES IN (1)`)
			n.next += 20
			n.delivered()
			n.marked()
			n.settled(25)
			n.exec(`CREATE TABLE taken AS SELECT * FROM p1`)
			n.exec(`BEGIN; DELETE FROM p1; INSERT INTO outbox_messages OVERRIDING SYSTEM VALUE SELECT * FROM taken; COMMIT`)
			n.add(10)
			n.delivered()
		})
	}
}

// TestDetachedOverRetention: a partition with delivered rows is detached, passes of retention delete what is old, and it is attached
// again. Its rows are not delivered again, and then they are deleted, too.
func TestDetachedOverRetention(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ by, partitions, key, detach, attach string }{
		"by list": {
			`LIST (tenant_id)`, `CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES IN (1); CREATE TABLE p2 PARTITION OF outbox_messages DEFAULT`,
			`id, tenant_id`, detach, `ALTER TABLE outbox_messages ATTACH PARTITION p1 FOR VALUES IN (1)`,
		},
		"a column changes": {
			`LIST (tenant_id)`, `CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES IN (1); CREATE TABLE p2 PARTITION OF outbox_messages DEFAULT;
				ALTER TABLE outbox_messages ADD note varchar(9)`,
			`id, tenant_id`, detach + `; ALTER TABLE outbox_messages ALTER note TYPE text`,
			`ALTER TABLE p1 ALTER note TYPE text; ALTER TABLE outbox_messages ATTACH PARTITION p1 FOR VALUES IN (1)`,
		},
		"by id and time": {
			`RANGE (id, occurred_at)`, `CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES FROM (1, MINVALUE) TO (41, MINVALUE);
				CREATE TABLE p2 PARTITION OF outbox_messages FOR VALUES FROM (41, MINVALUE) TO (MAXVALUE, MAXVALUE)`,
			`id, occurred_at`, detach, `ALTER TABLE outbox_messages ATTACH PARTITION p1 FOR VALUES FROM (1, MINVALUE) TO (41, MINVALUE)`,
		},
		"a part of a partition": {
			`RANGE (id)`, `CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES FROM (1) TO (41) PARTITION BY HASH (id);
				CREATE TABLE p1a PARTITION OF p1 FOR VALUES WITH (MODULUS 2, REMAINDER 0); CREATE TABLE p1b PARTITION OF p1 FOR VALUES WITH (MODULUS 2, REMAINDER 1);
				CREATE TABLE p2 PARTITION OF outbox_messages FOR VALUES FROM (41) TO (MAXVALUE)`,
			`id`, `ALTER TABLE p1 DETACH PARTITION p1a`, `ALTER TABLE outbox_messages ATTACH PARTITION p1a FOR VALUES FROM (1) TO (41)`,
		},
		"another one in its place": {
			`RANGE (id)`, range40, `id`,
			`BEGIN; ` + detach + `; ALTER TABLE p1 RENAME TO aside; CREATE TABLE p1 PARTITION OF outbox_messages FOR VALUES FROM (1) TO (41); COMMIT`,
			`ALTER TABLE outbox_messages ATTACH PARTITION aside FOR VALUES FROM (1) TO (41)`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := newNamed(t, outbox.MarkJournal, relay.ModeAuto)
			n.partitionedBy(c.by, c.partitions, c.key)
			n.start().working(relay.ModeAuto)
			n.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
				SELECT CASE WHEN n <= 40 THEN 1 ELSE 2 END, 'order', n, 'order.placed', jsonb_build_object('n', n) FROM generate_series(1, 50) n ORDER BY n`)
			n.next = 51
			n.delivered()
			n.settled(50)
			n.exec(c.detach)
			n.settled(50)
			for range 2 {
				n.retain(n.bound(), time.Millisecond)
			}
			n.exec(c.attach)
			n.settled(50)
			n.delivered()
			if !strings.HasPrefix(c.by, "RANGE (id)") { // the others keep their last partition
				n.retain(n.bound(), time.Millisecond)
				if rows := n.count(`SELECT count(*) FROM outbox_messages`) + n.count(`SELECT count(*) FROM outbox_journal`); rows != 0 {
					t.Errorf("%d rows and entries are left", rows)
				}
			}
		})
	}
}

// TestDetachedRowsAreStillDeferred: a partition with rows that failed, rows held behind them, and delayed ones is detached while
// retention makes a pass, and attached again. They wait as before: none is lost, and none comes before its time or out of order.
func TestDetachedRowsAreStillDeferred(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModePoll, relay.ModeAuto} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			n := newNamed(t, outbox.MarkJournal, mode)
			n.partitioned()
			x := n.start().working(mode)
			n.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at) SELECT 'order', CASE WHEN n <= 20 THEN 1 ELSE 2 END,
				CASE WHEN n = 1 THEN 'order cursed' ELSE 'order.placed' END, jsonb_build_object('n', n), now() + CASE WHEN n > 20 THEN interval '1 hour' ELSE '0' END
				FROM generate_series(1, 40) n ORDER BY n`)
			const deferred = `SELECT count(*) FROM outbox_deferred`
			eventually(t, "all are deferred", func() bool { return n.count(deferred) == 40 })
			n.settled(40)
			n.next = 41
			n.add(10)
			n.settled(50)
			n.exec(detach)
			// They are held behind the failed row, which is away now.
			eventually(t, "the rows of the other partition are delivered", func() bool { return n.storedCount() == 10 })
			n.settled(50)
			n.retain(n.bound(), time.Hour)
			if got := n.count(deferred); got != 40 {
				t.Errorf("%d deferrals are left, want 40", got)
			}
			n.exec(attach)
			n.settled(50)
			if got := n.storedCount(); got != 10 {
				t.Errorf("%d events are stored, want 10", got)
			}
			// The failed row is put right, and the delayed ones are due.
			n.exec(`DELETE FROM outbox_deferred WHERE id = 1; DELETE FROM outbox_messages WHERE id = 1`)
			n.exec(`UPDATE outbox_deferred SET available_at = now()`)
			eventually(t, "all others are delivered", func() bool { return n.storedCount() >= 49 })
			x.halt()
			got := n.numbers()
			slices.Sort(got)
			if want := append(span(2, 40), span(41, 50)...); !slices.Equal(got, want) {
				t.Errorf("stored %s, want %s", brief(got), brief(want))
			}
		})
	}
}

// TestNoRowOfAnotherTableIsSkipped: the first start with postgres.initial none waits for a lock, and meanwhile another table
// gets the name of an outbox. All its rows are delivered.
func TestNoRowOfAnotherTableIsSkipped(t *testing.T) {
	t.Parallel()
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkJournal} {
		n := newNamed(t, mark, relay.ModePoll)
		n.cfg.Initial = "none"
		n.exec(`CREATE TABLE first (LIKE outbox_messages INCLUDING ALL);
			INSERT INTO first (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.placed', '{"n": 0}')`)
		first := outbox.Table{Schema: "public", Name: "first", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
		n.cfg.Outboxes = append([]*outbox.Table{&first}, n.cfg.Outboxes...)
		lock := n.conn()
		n.must(run(t.Context(), lock, `BEGIN; SELECT FROM first FOR UPDATE`))
		n.start()
		eventually(t, "the start waits for the row", func() bool {
			return n.query1(`SELECT count(*)::text FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`) == "1"
		})
		n.replace()
		n.add(60)
		n.must(run(t.Context(), lock, `ROLLBACK`))
		n.delivered()
	}
}
