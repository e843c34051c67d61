package relay_test

import (
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

const moveWindow = 100 * time.Millisecond

// partition makes the outbox one that is partitioned by a column which is none of the
// event's.
func (r *rig) partition() {
	r.t.Helper()
	r.exec(`ALTER TABLE outbox_messages RENAME TO old_outbox;
		CREATE TABLE outbox_messages (LIKE old_outbox INCLUDING DEFAULTS INCLUDING IDENTITY, region text NOT NULL DEFAULT 'a') PARTITION BY LIST (region);
		CREATE TABLE outbox_a PARTITION OF outbox_messages FOR VALUES IN ('a');
		CREATE TABLE outbox_b PARTITION OF outbox_messages FOR VALUES IN ('b');
		CREATE INDEX ON outbox_messages (id); CREATE INDEX ON outbox_messages (processed_at);
		ALTER TABLE outbox_a REPLICA IDENTITY FULL; ALTER TABLE outbox_b REPLICA IDENTITY FULL;
		DROP PUBLICATION IF EXISTS walpost; DROP TABLE old_outbox`)
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = moveWindow })
}

const moveRowsSQL = `UPDATE outbox_messages SET region = 'b' WHERE region = 'a' AND processed_at IS NULL`

// TestStoredRowMovesToAnotherPartition before it can be marked: to the WAL that is another
// INSERT. A row that is stored by another session moves, too.
func TestStoredRowMovesToAnotherPartition(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.partition()
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)

	mover := r.seize(putSQL, "order.placed", 11, 20)
	eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 20 })
	r.duplicateWindowPasses(moveWindow)
	r.must(run(t.Context(), mover, moveRowsSQL))
	r.must(run(t.Context(), mover, "COMMIT"))
	r.put(21, 25)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 25)

	mover = r.seize(putSQL, "order.placed", 26, 30)
	eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 30 })
	x.halt()
	r.duplicateWindowPasses(moveWindow)
	r.must(run(t.Context(), mover, moveRowsSQL))
	r.must(run(t.Context(), mover, "COMMIT"))
	x = r.start().streaming()
	r.put(31, 35)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 35)
	x.quietBut()
	x.quiet("missed_rows", "rows_deleted")
}

// TestMarkedRowComesOnceMore: rows are moved while they are pending, and marked before the WAL brings their
// second INSERT.
func TestMarkedRowComesOnceMore(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.partition()
	x := r.start().streaming()
	mover := r.seize(putSQL, "order.placed", 1, 10)
	eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 10 })
	r.duplicateWindowPasses(moveWindow)
	walsender := r.count(`SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
	r.must(syscall.Kill(walsender, syscall.SIGSTOP))
	resume := sync.OnceFunc(func() { _ = syscall.Kill(walsender, syscall.SIGCONT) })
	t.Cleanup(resume)
	r.must(run(t.Context(), mover, moveRowsSQL))
	r.must(run(t.Context(), mover, "COMMIT"))
	r.pending(0)
	resume()
	r.put(11, 15)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 15)
	x.quietBut()
}

// TestRowsMoveWhileTheRelayIsAway: the WAL has them twice, with so many between that the
// first ones are marked when the second ones come.
func TestRowsMoveWhileTheRelayIsAway(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.partition()
	x := r.start().streaming()
	r.put(1, 5)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	rows := testenv.Size(t, 20_000, 40_000) // more than are sent past one that is not marked
	r.put(6, 1000)
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, region)
		SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n), 'b' FROM generate_series(1001, $1::int) n ORDER BY n`, rows)
	r.exec(moveRowsSQL)
	x = r.start().streaming()
	r.put(rows+1, rows+5)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, rows+5)
	x.quiet("missed_rows")
}

// TestParkedRowMovesToAnotherPartition: it stays parked, and later rows of its aggregate held.
func TestParkedRowMovesToAnotherPartition(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.partition()
	x := r.start().streaming()
	bad := set{"event_type": `'order placed'`}
	r.exec(bad.insert("outbox_messages", 1, canonicalRow))
	r.put(2, 3)
	parked := `SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL`
	eventually(t, "the rows are parked and held", func() bool { return r.query1(parked) == "3" })
	r.exec(moveRowsSQL)
	r.put(4, 5)
	eventually(t, "the later rows are held, too", func() bool { return r.query1(parked) == "5" })
	r.passes(r.here())
	r.exec(`UPDATE outbox_messages SET event_type = 'order.placed', available_at = now() WHERE payload ->> 'n' = '1'`)
	eventually(t, "all rows are delivered", func() bool { return r.unmarked() == 0 })
	r.storedIs(1, 5)
	x.quiet("missed_rows")
}

// TestFewMovedRowsAreRemembered: however many rows come from the table, whether or not the WAL is read,
// only those in hand need to be remembered. One of them moves, and is not sent again.
func TestFewMovedRowsAreRemembered(t *testing.T) {
	const most = 50
	for name, mode := range map[string]relay.Mode{"streaming": relay.ModeAuto, "polling": relay.ModePoll} {
		t.Run(name, func(t *testing.T) { // not in parallel: it changes a variable of the package
			reset := relay.SetMostMoved(most)
			defer reset()
			r := newRig(t, testenv.SharedPostgres(t))
			r.partition()
			r.cfg.Mode, r.cfg.FallbackInterval = mode, 100*time.Millisecond
			x := r.start()
			defer x.halt() // before the variable changes back
			eventually(t, "the relay is at work", func() bool { return x.Ready() == nil })
			delay := map[relay.Mode]string{relay.ModeAuto: "1050 milliseconds", relay.ModePoll: "0"}[mode]
			putLater := func(from, to int) {
				r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
					SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n), now() + $3::text::interval FROM generate_series($1::int, $2::int) n ORDER BY n`, from, to, delay)
			}
			r.exec(`CREATE TABLE gate (); ALTER TABLE gate REPLICA IDENTITY FULL; INSERT INTO gate DEFAULT VALUES;
				CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF NEW.payload ->> 'n' = '1' AND EXISTS (SELECT FROM public.gate) THEN RAISE 'not yet'; END IF;
					RETURN NEW;
				END $$;
				CREATE TRIGGER refuse BEFORE UPDATE OF processed_at ON outbox_messages FOR EACH ROW EXECUTE FUNCTION refuse()`)
			for n := 1; n < 300; n += 100 {
				putLater(n, n+99)
				eventually(t, "the rows are stored", func() bool { return r.storedCount() == uint64(n+99) })
			}
			r.pending(1)
			r.duplicateWindowPasses(moveWindow)
			r.exec(moveRowsSQL)
			putLater(301, 301)
			r.pending(1)
			r.exec(`DELETE FROM gate`)
			r.pending(0)
			eventually(t, "few rows are remembered", func() bool { return x.Moved() <= most })
			r.storedIs(1, 301)
		})
	}
}

// TestDetachedBeforeTheMark: a partition is detached while its rows are stored and not marked, and attached again: at once, when
// the relay has seen it, or after the relay was killed. The rows are not gone meanwhile, and stored once.
func TestDetachedBeforeTheMark(t *testing.T) {
	t.Parallel()
	for i, back := range []string{"at once", "later", "killed"} {
		for _, mark := range testenv.Some(t, 1, [][]outbox.Mark{{outbox.MarkUpdate, outbox.MarkDelete}, {outbox.MarkDelete, outbox.MarkUpdate}}[i%2]...) {
			t.Run(fmt.Sprintf("%s %s", mark, back), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.partition()
				r.cfg.FallbackInterval, r.cfg.Outboxes[0].Mark = 200*time.Millisecond, mark
				var x *running
				killed := func() {}
				if back == "killed" {
					killed = r.launch("WALPOST_MARK=" + string(mark)).awaitState("streaming").kill
				} else {
					x = r.start().streaming()
				}
				r.put(1, 10)
				r.pending(0)
				mover := r.seize(putSQL, "order.placed", 11, 20)
				eventually(t, "the rows are stored", func() bool { return r.storedCount() == 20 })
				if killed(); back == "killed" { // its statement waits for the lock, and would go on
					r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'walpost' AND datname = current_database()`)
				}
				r.must(run(t.Context(), mover, `ALTER TABLE outbox_messages DETACH PARTITION outbox_a`))
				r.must(run(t.Context(), mover, `COMMIT`))
				switch back {
				case "later":
					eventually(t, "the relay begins again", func() bool { return x.logs.FilterMessage("active: this relay holds the lock").Len() == 2 })
					x.streaming()
				case "killed":
					x = r.start().streaming()
					r.passes(r.here())
				}
				r.exec(`ALTER TABLE outbox_messages ATTACH PARTITION outbox_a FOR VALUES IN ('a')`)
				r.put(21, 25)
				r.pending(0)
				r.storedIs(1, 25)
				x.quietBut()
				x.halt()
			})
		}
	}
}
