package relay_test

import (
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/relay"
)

// TestPartitionByMonth: a table becomes a partitioned one under load, beside a relay that streams and one that polls. Every event
// is stored once, and those of an aggregate in their order.
func TestPartitionByMonth(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
				t.Parallel()
				r := newRig(t, pg)
				r.cfg.Mode = mode
				x := r.begin()
				var into atomic.Value
				into.Store("outbox_messages")
				written, stop := r.eachNumbered(4, &into)
				wait := func() {
					t.Helper()
					from, stored := written.Load(), r.storedCount()
					eventually(t, "more is written and stored", func() bool { return written.Load() >= from+150 && r.storedCount() >= stored+150 })
				}
				wait()
				cfg, err := pgx.ParseConfig(r.url)
				r.must(err)
				m := migrations.New(cfg, r.cfg.Outboxes)
				defer m.Close()
				done, err := m.PartitionByMonth(t.Context())
				r.must(err)
				if len(done) != 1 || !strings.Contains(done[0], "outbox_messages_old") {
					t.Errorf("done %q", done)
				}
				wait()
				// As many rows of other months, and of none that has a partition.
				r.exec(`ALTER TABLE outbox_messages ALTER occurred_at SET DEFAULT now() + ((random() * 200)::int - 30) * interval '1 day'`)
				wait()
				x.halt()
				x = r.begin()
				wait()
				stop()
				eventually(t, "everything is marked", func() bool {
					return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`) == int(written.Load())
				})
				x.halt()
				r.numbered(4, int(written.Load()))
				if n := r.count(`SELECT count(DISTINCT tableoid) FROM outbox_messages`); n < 3 {
					t.Errorf("rows are in %d partitions", n)
				}
			})
		})
	}
}

// TestPartitionsOfTenants: marks of one tenant's rows look into that tenant's partition only.
func TestPartitionsOfTenants(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.exec(`ALTER TABLE outbox_messages RENAME TO old_outbox;
				CREATE TABLE outbox_messages (LIKE old_outbox INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY LIST (tenant_id);
				CREATE TABLE outbox_1 PARTITION OF outbox_messages FOR VALUES IN (1);
				CREATE TABLE outbox_2 PARTITION OF outbox_messages FOR VALUES IN (2);
				CREATE TABLE outbox_rest PARTITION OF outbox_messages DEFAULT;
				CREATE INDEX by_id ON outbox_messages (id); CREATE INDEX ON outbox_messages (processed_at);
				ALTER TABLE outbox_1 REPLICA IDENTITY FULL; ALTER TABLE outbox_2 REPLICA IDENTITY FULL; ALTER TABLE outbox_rest REPLICA IDENTITY FULL;
				DROP PUBLICATION IF EXISTS walpost; DROP TABLE old_outbox`)
			r.cfg.Mode, r.cfg.FallbackInterval = mode, time.Hour
			if mode == relay.ModePoll {
				r.cfg.FallbackInterval = 100 * time.Millisecond
			}
			x := r.startAtWork()
			const put = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
				SELECT $1, 'order', n, 'order.placed', '{}' FROM generate_series(1, 500) n`
			looks := func(partition string) int {
				return r.count(`SELECT coalesce(sum(s.idx_scan), 0)::int FROM pg_stat_user_indexes s WHERE s.relname = '` + partition + `' AND s.indexrelname LIKE '%\_id\_idx'`)
			}
			// A search may look for the same ids in every partition, while the rows are in flight.
			more := func() int { return looks("outbox_1") - looks("outbox_2") }
			begun := more()
			r.exec(put, 1)
			r.pending(0)
			eventually(t, "marks of 500 rows look 500 times more into their tenant's partition than into another's",
				func() bool { return more()-begun >= 500 })
			r.exec(put, 3)
			r.pending(0)
			x.halt()
			if n := r.storedCount(); n != 1000 {
				t.Errorf("%d messages, want 1000", n)
			}
		})
	}
}
