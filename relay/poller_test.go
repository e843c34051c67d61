package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// withoutPayments makes a stream that does not take payments.
func (r *rig) withoutPayments() {
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
}

func (r *rig) takePayments() {
	r.t.Helper()
	s, err := r.js().Stream(r.t.Context(), "EVENTS")
	r.must(err)
	cfg := s.CachedInfo().Config
	cfg.Subjects = []string{"events.>"}
	_, err = r.js().UpdateStream(r.t.Context(), cfg)
	r.must(err)
}

// TestHeldRowsWaitForTheRecord: a failed row that is tried again and fails again
// keeps its place while the new record of it cannot be written.
func TestHeldRowsWaitForTheRecord(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.withoutPayments()
	r.cfg.Retry = table.Retry{Backoff: time.Second, MaxAttempts: 1000}
	r.start().streaming()
	r.exec(putSQL, "payment.made", 1, 1)
	r.put(2, 10)
	recorded := func(n string) func() bool {
		return func() bool {
			return r.query1(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL AND processed_at IS NULL`) == n
		}
	}
	eventually(t, "all rows are recorded", recorded("10"))
	c := r.conn()
	r.must(run(t.Context(), c, `BEGIN; LOCK TABLE outbox_messages IN SHARE MODE`)) // as CREATE INDEX does
	time.Sleep(4 * time.Second)
	r.must(run(t.Context(), c, `COMMIT`))
	r.storedIs()
	r.takePayments()
	eventually(t, "all is stored", func() bool { return r.storedCount() == 10 })
	r.storedIs(1, 10)
}

// TestLockedRecordHoldsUpNobodyElse: a recorded row that somebody has locked keeps
// its own aggregate waiting at a start, and no other.
func TestLockedRecordHoldsUpNobodyElse(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.withoutPayments()
			r.cfg.Mode = mode
			r.cfg.Retry = table.Retry{Backoff: 10 * time.Millisecond, MaxAttempts: 1000}
			x := r.start()
			r.exec(putSQL, "payment.made", 1, 1)
			eventually(t, "the row is parked", func() bool { return r.query1(`SELECT max(attempts) > 0 FROM outbox_messages`) == "true" })
			x.halt()
			c := r.conn()
			r.must(run(t.Context(), c, `BEGIN; SELECT FROM outbox_messages FOR UPDATE`))
			r.start()
			r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 2, 'order.placed', '{"n": 2}')`)
			eventually(t, "the other aggregate's row is stored", func() bool { return r.storedCount() == 1 })
			r.takePayments()
			r.must(run(t.Context(), c, `ROLLBACK`))
			eventually(t, "both are stored", func() bool { return r.storedCount() == 2 })
		})
	}
}

// TestNoDueTime: where available_at may be NULL, such a row is due at once.
func TestNoDueTime(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`ALTER TABLE outbox_messages ALTER available_at DROP NOT NULL, ALTER available_at DROP DEFAULT`)
	r.put(1, 5)
	x := r.start().streaming()
	r.storedIs(1, 5)
	r.put(6, 7)
	r.pending(0)
	x.halt()
	r.cfg.Mode = relay.ModePoll
	r.start()
	r.put(8, 9)
	r.pending(0)
	r.storedIs(1, 9)
}

// TestIdleServerProves: on a server where nobody writes, a row that falls due needs
// nobody's commit to be proven.
func TestIdleServerProves(t *testing.T) {
	t.Parallel()
	testenv.ClustersWith(t, testenv.PGOptions{Settings: map[string]string{"autovacuum": "off"}}, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.FallbackInterval = time.Hour
		x := r.start().streaming()
		for n := 1; n <= 4; n++ {
			r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
				SELECT 'order', 1, 'order.placed', jsonb_build_object('n', $1::int), now() + interval '3 seconds'`, n)
			r.passes(r.here())
			x.halt()
			x = r.start().streaming()
			begun := time.Now()
			r.pending(0)
			t.Logf("stored and marked %s after the start, due within 3 s", time.Since(begun).Round(time.Millisecond))
		}
		r.storedIs(1, 4)
	})
}

// TestLockedTableHoldsUpNoOther: of two tables one is locked.
func TestLockedTableHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`CREATE TABLE more (LIKE outbox_messages INCLUDING ALL)`)
	more := *r.cfg.Outboxes[0]
	more.Name = "more"
	r.cfg.Outboxes = []*outbox.Table{r.cfg.Outboxes[0], &more}
	r.cfg.Mode = relay.ModePoll
	x := r.start()
	eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
	c := r.conn()
	r.must(run(t.Context(), c, `BEGIN; LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE`))
	r.exec(`INSERT INTO more (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n) FROM generate_series(1, 5) n`)
	eventually(t, "the other table's rows are stored", func() bool { return r.storedCount() == 5 })
	r.must(run(t.Context(), c, `COMMIT`))
	r.put(6, 7)
	r.pending(0)
	r.storedIs(1, 7)
}

// TestRowsWithoutAnAggregate wait for nobody.
func TestRowsWithoutAnAggregate(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.withoutPayments()
	r.exec(`ALTER TABLE outbox_messages ALTER aggregate_id DROP NOT NULL`)
	r.cfg.Retry = table.Retry{Backoff: 20 * time.Millisecond, MaxAttempts: 1000}
	x := r.start().streaming()
	r.exec(`INSERT INTO outbox_messages (aggregate_type, event_type, payload) SELECT 'order', CASE WHEN n <= 2 THEN 'payment.made' ELSE 'order.placed' END,
		jsonb_build_object('n', n) FROM generate_series(1, 5) n ORDER BY n`)
	r.pending(0)
	r.storedIs(3, 5)
	x.halt()
	r.exec(`UPDATE outbox_messages SET available_at = now() + interval '1 hour' WHERE payload ->> 'n' = '1'`)
	r.takePayments()
	r.start()
	eventually(t, "the second row does not wait for the first", func() bool { return r.storedCount() == 4 })
	r.storedIs(3, 5, 2, 2)
}
