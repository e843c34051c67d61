package relay_test

import (
	"strings"
	"sync/atomic"
	"testing"

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
					eventually(t, "more is written and stored", func() bool { return written.Load() >= from+300 && r.storedCount() >= stored+300 })
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
