package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// retainOften has every delivered row archived about a second later.
var retainOften = relay.Retention{ArchiveAfter: time.Second, Interval: 300 * time.Millisecond}

// TestRetention: delivered rows move to the archive while the relay works, and
// only they. The latencies are printed.
func TestRetention(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		l := newLedger(r)
		var quiet, busy timings
		x := r.start().streaming()
		stop := l.start(load{writers: 2, rows: 50, pause: 10 * time.Millisecond})
		eventually(t, "a heap of rows is stored", func() bool { return r.storedCount() > uint64(testenv.Size(t, 3000, 20_000)) })
		stop()
		l.delivered()
		x.halt()
		r.cfg.OnStored = quiet.add
		light := load{writers: 2, rows: 5, pause: 10 * time.Millisecond}
		x = r.start().streaming()
		before := r.storedCount()
		stop = l.start(light)
		eventually(t, "some seconds of load", func() bool { return r.storedCount() > before+1000 })
		stop()
		l.delivered()
		x.halt()
		if n := r.query1(`SELECT count(*) FROM outbox_messages_archive`); n != "0" {
			t.Fatalf("%s rows are in the archive, and retention is off", n)
		}

		// What may not move: a delayed row, a parked one and one behind it.
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, available_at) VALUES
			('keep', 1, 'a.b', '{}', now() - interval '9 days', now() + interval '1 day')`)
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at) VALUES
			('keep', 2, 'a.*', '{}', now() - interval '9 days'), ('keep', 2, 'a.b', '{}', now() - interval '9 days')`)
		r.cfg.OnStored, r.cfg.Retention = busy.add, retainOften
		x = r.start().streaming()
		before = r.storedCount()
		stop = l.start(light)
		eventually(t, "some seconds of load", func() bool { return r.storedCount() > before+1000 })
		eventually(t, "all the old rows are in the archive, and young ones too", func() bool {
			return r.query1(`SELECT count(*) > $1 + 1000 FROM outbox_messages_archive`, before) == "true"
		})
		stop()
		kept := `SELECT count(*) FROM outbox_messages WHERE aggregate_type = 'keep' AND processed_at IS NULL`
		eventually(t, "a row is parked and one is held", func() bool { return r.query1(kept+` AND last_error IS NOT NULL`) == "2" })
		if n := r.query1(kept); n != "3" {
			t.Errorf("%s of 3 undelivered rows are in the outbox", n)
		}
		r.exec(`DELETE FROM outbox_messages WHERE aggregate_type = 'keep'`)
		l.delivered()
		if n := r.query1(`SELECT count(*) || ' ' || count(DISTINCT id) || ' ' || (SELECT sum(n) FROM ledger) FROM
			(SELECT id FROM outbox_messages UNION ALL SELECT id FROM outbox_messages_archive) x`); !allEqual(n) {
			t.Errorf("rows, ids and committed rows in outbox and archive: %s", n)
		}
		x.quiet("events_lost", "missed_rows", "nothing_to_compare", "row_locked")
		if n := x.logged("retention").Len(); n == 0 {
			t.Error("nothing is logged")
		}
		if c := x.logged("retention could not do all its work").All(); len(c) > 0 {
			t.Errorf("complaint: %v", c[0].ContextMap())
		}
		t.Logf("commit to PubAck without retention: %s; while it works: %s", &quiet, &busy)
		x.halt()
		x = r.start().streaming() // and the next start misses none of the rows that are gone
		eventually(t, "rows are archived after a restart", func() bool { return r.query1(`SELECT count(*) FROM outbox_messages`) == "0" })
		x.quiet("events_lost", "missed_rows", "nothing_to_compare")
		x.halt()
		r.must(r.js().DeleteStream(t.Context(), "EVENTS"))
		x = r.start()
		x.ends()
		if x.err == nil || !strings.Contains(x.err.Error(), "marked as stored") || r.streamExists() {
			t.Errorf("every row is in the archive and the stream is gone: the relay ended with %v", x.err)
		}
	})
}

// TestRetentionHoldsUpNobody: a pass that hangs in a statement is broken off when
// the relay stops, loses its lock or its server.
func TestRetentionHoldsUpNobody(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.start().streaming().halt()
		alone := r.shutDown()
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at) VALUES ('a', 1, 'a.b', '{}', now() - interval '1 day')`)
		r.exec(`CREATE FUNCTION hang() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN OLD; END';
			CREATE TRIGGER hang BEFORE DELETE ON outbox_messages FOR EACH ROW EXECUTE FUNCTION hang()`)
		r.cfg.Retention = retainOften
		x := r.start().streaming()
		hangs := func() {
			t.Helper()
			eventually(t, "a pass hangs", func() bool {
				return r.query1(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()`) == "1"
			})
		}
		hangs()
		r.put(1, 10)
		r.pending(0)

		r.exec(`SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND objid::bigint =
			hashtextextended('walpost/' || $1, 0) & 4294967295 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`, r.cfg.Slot)
		begun := time.Now()
		r.put(11, 20)
		r.pending(0)
		t.Logf("the relay works again %s after its lock was lost", time.Since(begun).Round(time.Millisecond))
		hangs()
		if took := r.shutDown(); took > alone+5*time.Second {
			t.Errorf("the server stops in %s, without a relay in %s", took, alone)
		}
		x.streaming()
		hangs()
		begun = time.Now()
		x.halt()
		if took := time.Since(begun); took > 5*time.Second {
			t.Errorf("the relay stops in %s", took)
		}
		eventually(t, "the pass has gone", func() bool {
			return r.query1(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()`) == "0"
		})
		r.storedIs(1, 20)
	})
}

// allEqual compares the words of a line.
func allEqual(line string) bool {
	words := strings.Fields(line)
	return len(words) > 1 && !slices.ContainsFunc(words, func(w string) bool { return w != words[0] })
}

// timings are collected to be printed, never to be judged.
type timings struct {
	mu  sync.Mutex
	all []time.Duration
}

func (l *timings) add(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, d)
}

func (l *timings) percentile(n int) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at(n)
}

// at is percentile for a caller that holds mu.
func (l *timings) at(n int) time.Duration {
	slices.Sort(l.all)
	return l.all[(len(l.all)-1)*n/100]
}

func (l *timings) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) == 0 {
		return "nothing"
	}
	at := func(n int) time.Duration { return l.at(n).Round(10 * time.Microsecond) }
	return fmt.Sprintf("p50 %s, p99 %s, max %s (%d)", at(50), at(99), at(100), len(l.all))
}
