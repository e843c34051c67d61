package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestRowsInsertedAsMarked: history that is put back is nothing to deliver.
func TestRowsInsertedAsMarked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.start().streaming()
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
		SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n), now() - interval '3 days', now() - interval '3 days' FROM generate_series(1, 10) n`)
	r.put(11, 12)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(11, 12)
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
			DROP PUBLICATION IF EXISTS walpost; DROP TABLE old_outbox`)
		x := r.start().streaming()
		r.put(1, 10)
		r.pending(0)
		r.put(11, 20) // behind the marks of the others
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, 20)
		x.quietBut()
	})
}
