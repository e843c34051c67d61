package relay_test

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/testenv"
)

// TestHostileAggregates: 800 rows of aggregates with 100 kB in their names cannot be sent. They
// compress to nothing in the table, and the relay keeps no more of them.
func TestHostileAggregates(t *testing.T) {
	needsProc(t)
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.account.moved"} })
	x := r.launch().awaitState("streaming")
	idle := x.peak()
	const hostile = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT repeat('x', 100000) || g, 1, $1, '{}' FROM generate_series(1, 800) g`
	r.exec(hostile, "account.cursed")
	r.exec(hostile, "account.moved")
	eventually(t, "the rows are parked, and the later ones of their aggregates held", func() bool {
		return r.count(heldRows) == 800 && r.count(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL`) == 1600
	})
	r.exec(moveOneSQL)
	eventually(t, "another aggregate's event is stored", func() bool { return r.storedCount() == 1 })
	t.Logf("memory: %s idle, %s at most", mib(idle), mib(x.peak()))
	x.bounded()
	x.terminate()
	x = r.launch().awaitState("streaming")
	r.exec(moveOneSQL)
	eventually(t, "another event is stored", func() bool { return r.storedCount() == 2 })
	t.Logf("memory after a restart: %s at most", mib(x.peak()))
	x.bounded()
}

const moveOneSQL = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('free', 1, 'account.moved', '{"n": 1}')`

// TestMillionHeldAggregates: a row of each of a million aggregates has failed, or of a few more than the relay
// remembers. It holds the later rows of all, and delivers those of others.
func TestMillionHeldAggregates(t *testing.T) {
	needsProc(t)
	t.Parallel()
	r := newRigWith(t, testenv.NewPostgres(t, testenv.PGOptions{}), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.account.moved"} })
	r.launch().awaitState("streaming").terminate()
	million := testenv.Size(t, fallback.MostHeld*6/5, 1_000_000)
	free := testenv.Size(t, 3000, 20_000)
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at, attempts, last_error)
		SELECT 'account', g, 'account.cursed', '{}', now() + interval '1 hour', 1, 'uncovered: subject' FROM generate_series(1, $1::int) g`, million)
	r.exec(`SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())`, r.cfg.Slot)
	r.exec(`VACUUM ANALYZE outbox_messages`)

	x := r.launch().awaitState("streaming")
	t.Logf("memory after the start: %s at most", mib(x.peak()))
	const later = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'account', n, 'account.moved', jsonb_build_object('n', n + 1) FROM generate_series($1::int, $2::int, $3::int) n ORDER BY n`
	r.exec(later, 1, million, 100)                   // held
	r.exec(later, million+1, million+free, 1)        // free
	r.exec(later, million+30_000, million+30_000, 1) // by itself
	eventually(t, "the rows of other aggregates are stored", func() bool { return r.storedCount() == uint64(free+1) })
	eventually(t, "the later rows of failed ones are held", func() bool { return r.count(heldRows) == million/100 })
	if n := r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL AND aggregate_id <= $1`, million); n != 0 {
		t.Errorf("%d rows have passed the failed ones of their aggregates", n)
	}
	t.Logf("memory: %s at most", mib(x.peak()))
	if peak := x.peak(); peak > 128<<20 {
		t.Errorf("the relay occupied %s of memory, want at most 128 MiB", mib(peak))
	}

	// The cause is gone for one in a hundred. They and what waits behind them come out, in order.
	r.exec(`UPDATE outbox_messages SET event_type = 'account.moved', payload = '{"n": 1}', available_at = now() WHERE processed_at IS NULL AND attempts = 1 AND aggregate_id % 100 = 1`)
	x.terminate()
	x = r.launch().awaitState("streaming")
	eventually(t, "the rows come out", func() bool { return r.storedCount() == uint64(free+1+2*million/100) })
	r.inOrder(free + 1 + 2*million/100)
	t.Logf("memory after what was held came out: %s at most", mib(x.peak()))
	if peak := x.peak(); peak > 128<<20 {
		t.Errorf("the relay occupied %s of memory, want at most 128 MiB", mib(peak))
	}
}
