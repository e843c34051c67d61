package relay_test

import (
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
)

// TestFailoverLosesRecords: the standby has a parked row and one that waits behind it, and a
// synchronised slot that is past both, but not their records, which came later. A later row of
// the aggregate does not pass them.
func TestFailoverLosesRecords(t *testing.T) {
	t.Parallel()
	testenv.ClustersWith(t, testenv.PGOptions{}, func(t *testing.T, primary *testenv.Postgres) {
		if primary.Version() < 17 {
			t.Skip("failover slots came with 17")
		}
		t.Parallel()
		r := newRig(t, primary)
		r.cfg.Retry = table.Retry{Backoff: 30 * time.Millisecond, MaxAttempts: 1000}
		r.withoutPayments()
		standby := primary.NewStandby(t, "sb", map[string]string{"sync_replication_slots": "on", "wal_retrieve_retry_interval": "1h"})
		r.must(primary.Reload(t.Context(), map[string]string{"synchronized_standby_slots": "sb"}))
		db := r.query1(`SELECT current_database()::text`)
		there := *r
		there.pg, there.url = standby, standby.URL(db)
		x := r.start().streaming()
		n := 0
		synced := func(past string) bool {
			return there.query1(`SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1 AND synced AND NOT temporary
				AND invalidation_reason IS NULL AND confirmed_flush_lsn >= $2::text::pg_lsn`, r.cfg.Slot, past) == "1"
		}
		eventually(t, "the standby has the slot", func() bool {
			n++
			r.put(n, n)
			r.exec(`CHECKPOINT`) // the slot's restart_lsn moves on
			return synced("0/0")
		})
		r.pending(0)

		// Records wait until the standby receives nothing any more.
		gate := r.conn()
		r.must(run(t.Context(), gate, `SELECT pg_advisory_lock(1)`))
		r.exec(`CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock_shared(1); RETURN NEW; END $$`)
		r.exec(`CREATE TRIGGER wait BEFORE UPDATE ON outbox_messages FOR EACH ROW WHEN (NEW.last_error IS NOT NULL) EXECUTE FUNCTION wait()`)
		r.exec(putSQL, "payment.made", n+1, n+1)
		r.put(n+2, n+2)
		written := r.query1(`SELECT pg_current_wal_insert_lsn()::text`)
		eventually(t, "the standby has the rows", func() bool {
			return r.query1(`SELECT restart_lsn >= $1::text::pg_lsn FROM pg_replication_slots WHERE slot_name = 'sb'`, written) == "true"
		})
		// Later the walsender waits for the standby, and tells the relay of no further WAL.
		eventually(t, "the relay has been told of the rows, and of the WAL behind them", func() bool {
			return r.query1(`SELECT count(*) FROM pg_stat_replication WHERE sent_lsn >= $1::text::pg_lsn`, written) == "2"
		})
		eventually(t, "the standby receives nothing any more", func() bool {
			if pid, err := strconv.Atoi(there.query1(`SELECT coalesce(max(pid), 0) FROM pg_stat_wal_receiver`)); err == nil && pid != 0 {
				_ = syscall.Kill(pid, syscall.SIGTERM)
			}
			return there.query1(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'RecoveryRetrieveRetryInterval'`) == "1"
		})
		r.must(run(t.Context(), gate, `SELECT pg_advisory_unlock(1)`))
		eventually(t, "the slot is past rows whose records the standby lacks", func() bool { return synced(written) })
		x.halt()
		r.must(primary.Stop(t.Context(), testenv.Immediate))
		r.must(standby.Promote(t.Context()))

		r.pg, r.url, r.cfg.PostgresURL = there.pg, there.url, there.url
		if lost := r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND last_error IS NULL`); lost != "2" {
			t.Fatalf("%s rows have lost their records, want 2: the test shows nothing", lost)
		}
		r.exec(`DROP TRIGGER wait ON outbox_messages`)
		r.put(n+3, n+10)
		x = r.start().streaming()
		eventually(t, "all wait for the first one", func() bool {
			return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND last_error IS NOT NULL`) == "10" ||
				r.storedCount() > uint64(n)
		})
		r.storedIs(1, n)
		r.takePayments()
		eventually(t, "all are stored", func() bool { return r.storedCount() >= uint64(n+10) })
		r.put(n+11, n+20)
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, n+20)
		x.quiet("events_lost", "missed_rows", "phantoms", "foreign_message", "rival")
	})
}
