package relay_test

import (
	"strings"
	"testing"
	"time"

	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

type observedEntry = observer.LoggedEntry

func contains(v any, part string) bool {
	s, ok := v.(string)
	return ok && strings.Contains(s, part)
}

// TestPollMode: a server that cannot decode its WAL has its tables polled.
func TestPollMode(t *testing.T) {
	t.Parallel()
	testenv.ClusterWith(t, testenv.PGOptions{Settings: map[string]string{"wal_level": "replica"}}, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		l := newLedger(r)
		x := r.start()
		eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
		if x.metric("walpost_mode", "mode", "poll") != 1 || x.metric("walpost_mode", "mode", "stream") != 0 {
			t.Error("walpost_mode does not say poll")
		}
		begun := time.Now()
		stop := l.start(load{writers: 4, rows: 50, pause: 10 * time.Millisecond})
		eventually(t, "events are stored", func() bool { return r.storedCount() > uint64(testenv.Size(t, 3000, 20_000)) })
		stop()
		l.delivered()
		t.Logf("polled %.0f rows/s under load", float64(l.committed())/time.Since(begun).Seconds())
		if n := x.metric("walpost_missed_rows_total"); n != 0 {
			t.Errorf("%v rows were missed", n)
		}
		x.halt()

		// A backlog of more than one pass.
		each := testenv.Size(t, 1100, 3125)
		r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id)
			SELECT 1, 'account', 100 + g % 16, 'account.moved', '{}', g / 16 + 1 FROM generate_series(0, 16 * $1::int - 1) g ORDER BY g`, each)
		r.exec(`INSERT INTO ledger SELECT 100 + g, $1 FROM generate_series(0, 15) g`, each)
		x = r.start()
		begun = time.Now()
		l.delivered()
		t.Logf("polled a backlog of %d rows at %.0f rows/s", 16*each, float64(16*each)/time.Since(begun).Seconds())
	})
}

// TestModeSwitches: the relay streams as soon as it may, and polls as soon as it
// may not, under load.
func TestModeSwitches(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		l := newLedger(r)
		r.exec(`CREATE ROLE relay LOGIN; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO relay; GRANT SELECT, INSERT, UPDATE ON outbox_known, outbox_sent TO relay; GRANT SELECT, INSERT ON outbox_messages_dlq TO relay;
			CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert', publish_via_partition_root = true)`)
		r.cfg.PostgresURL = strings.Replace(r.url, "postgres@", "relay@", 1)
		x := r.start()
		eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
		stop := l.start(load{writers: 4, rows: 10, pause: 150 * time.Millisecond}) // a poller keeps up with that, race-instrumented too
		for range 2 {
			before := r.storedCount()
			eventually(t, "events are stored", func() bool { return r.storedCount() > before+100 })
			r.exec(`ALTER ROLE relay REPLICATION`)
			x.streaming()
			before = r.storedCount()
			eventually(t, "events are stored", func() bool { return r.storedCount() > before+100 })
			r.exec(`ALTER ROLE relay NOREPLICATION`)
			r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_replication WHERE usename = 'relay'`)
			eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
		}
		x.alarmed("slot_left") // the role may not drop it; said once in ten minutes
		r.exec(`ALTER ROLE relay REPLICATION`)
		x.streaming()
		stop()
		l.delivered()
		if n := x.metric("walpost_missed_rows_total"); n != 0 {
			t.Errorf("%v rows were missed", n)
		}
		x.halt()
		r.exec(`ALTER ROLE relay NOREPLICATION`)
		r.cfg.Mode = relay.ModePoll
		x = r.start()
		stop = l.start(load{writers: 4, rows: 10, pause: 150 * time.Millisecond})
		before := r.storedCount()
		eventually(t, "events are stored", func() bool { return r.storedCount() > before+100 })
		stop()
		l.delivered()
		x.halt()
		r.exec(`REASSIGN OWNED BY relay TO postgres; DROP OWNED BY relay; DROP ROLE relay`)
	})
}

// TestInitial: what a first start does with rows that are pending already.
func TestInitial(t *testing.T) {
	t.Parallel()
	pg := testenv.SharedPostgres(t)
	t.Run("none", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.Initial = "none"
		r.put(1, 1000)
		x := r.start().streaming()
		r.put(1001, 1010)
		r.pending(0)
		r.storedIs(1001, 1010)
		x.halt()
		// Once: not what is pending at the next start.
		r.put(1011, 1020)
		x = r.start().streaming()
		r.pending(0)
		r.storedIs(1001, 1020)
		x.quiet("events_lost")
	})
	t.Run("none, and nothing is pending", func(t *testing.T) {
		t.Parallel()
		n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
		r := newRigWith(t, pg, n)
		r.cfg.Initial = "none"
		x := r.start().streaming()
		r.must(n.Kill()) // what ends a session does not make another first start
		r.put(1, 10)
		r.loseByDrop()
		r.must(n.Start(t.Context()))
		r.pending(0)
		r.storedIs(1, 10)
		x.halt()
		// Neither do an empty stream and a lost slot.
		s, err := r.js().Stream(t.Context(), "EVENTS")
		r.must(err)
		r.must(s.Purge(t.Context()))
		r.put(11, 20)
		r.dropSlot(r.cfg.Slot)
		r.start().streaming()
		r.pending(0)
		r.storedIs(11, 20)
	})
	t.Run("none, of two outboxes", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, pg)
		r.exec(`CREATE TABLE other (LIKE outbox_messages INCLUDING ALL)`)
		other := *r.cfg.Outboxes[0]
		other.Name = "other" // and comes second
		r.cfg.Outboxes = append(r.cfg.Outboxes, &other)
		r.cfg.Initial = "none"
		r.put(1, 10)
		r.exec(`INSERT INTO other SELECT * FROM outbox_messages`)
		c := r.conn()
		r.must(run(t.Context(), c, `BEGIN`))
		r.must(run(t.Context(), c, `SELECT FROM other FOR UPDATE`))
		x := r.start()
		eventually(t, "the statement that waits is ended", func() bool {
			return r.count(`SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
				WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'WITH marked AS (UPDATE %'`) > 0
		})
		r.must(run(t.Context(), c, `COMMIT`))
		x.streaming()
		r.put(11, 20)
		r.pending(0)
		r.storedIs(11, 20)
		x.quietBut()
	})
	t.Run("none, and no WAL", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.Initial, r.cfg.Mode = "none", relay.ModePoll
		r.put(1, 10)
		x := r.start()
		eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
		r.put(11, 20)
		r.pending(0)
		r.storedIs(11, 20)
	})
	t.Run("none, and the role may not read the WAL", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{})) // a cluster of its own: for the role
		r.cfg.Initial = "none"
		r.exec(`CREATE ROLE relay LOGIN; GRANT SELECT, UPDATE, DELETE ON outbox_messages TO relay;
			GRANT SELECT, INSERT ON outbox_messages_dlq TO relay; GRANT SELECT, INSERT, UPDATE ON outbox_known TO relay; CREATE PUBLICATION walpost
			FOR TABLE outbox_messages WITH (publish = 'insert', publish_via_partition_root = true)`)
		r.cfg.PostgresURL = strings.Replace(r.url, "postgres@", "relay@", 1)
		r.put(1, 10)
		x := r.start()
		x.ends()
		if x.err == nil || !strings.Contains(x.err.Error(), "lacks privileges on table outbox_sent: SELECT, INSERT, UPDATE") {
			t.Fatalf("the relay ended with %v", x.err)
		}
		r.exec(`GRANT SELECT, INSERT, UPDATE ON outbox_known, outbox_sent TO relay`)
		x = r.start()
		eventually(t, "the relay polls", func() bool { return x.Status().State == "polling" })
		r.put(11, 20)
		r.pending(0)
		x.halt()
		r.exec(`ALTER ROLE relay REPLICATION`)
		r.put(21, 30)
		r.start().streaming() // not for the first time
		r.pending(0)
		r.storedIs(11, 30)
	})
	t.Run("none, and nothing remembers", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.Initial = "none"
		r.exec(`DROP TABLE outbox_sent`)
		r.put(1, 10)
		x := r.start()
		x.ends()
		if x.err == nil || !strings.Contains(x.err.Error(), "needs table outbox_sent") {
			t.Fatalf("the relay ended with %v", x.err)
		}
		r.cfg.Initial = ""
		r.start().streaming()
		r.pending(0)
		r.storedIs(1, 10)
	})
	t.Run("too many", func(t *testing.T) {
		t.Parallel()
		r := newRig(t, pg)
		r.exec(`CREATE TABLE quiet (LIKE outbox_messages INCLUDING ALL)`)
		quiet := *r.cfg.Outboxes[0]
		quiet.Name = "quiet" // and stands first
		r.cfg.Outboxes = []*outbox.Table{&quiet, r.cfg.Outboxes[0]}
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'a', 1, 'b.c', '{}' FROM generate_series(1, 100001)`)
		x := r.start()
		x.ends()
		if x.err == nil || !strings.Contains(x.err.Error(), "postgres.initial must say") {
			t.Errorf("the relay ended with %v", x.err)
		}
		if n := r.query1(`SELECT (SELECT count(*) FROM pg_replication_slots WHERE database = current_database()) + (SELECT count(*) FROM pg_publication WHERE pubname <> 'theirs')`); n != "0" {
			t.Errorf("%s things were made", n)
		}
		r.cfg.Initial = "pending"
		x = r.start()
		want := uint64(testenv.Size(t, 3000, 100_001))
		eventually(t, "the rows are stored", func() bool { return r.storedCount() >= want })
		if want > 100_000 {
			x.streaming()
		}
	})
}

// TestAlmostDueRowsKeepTheirPlace: a row is not delayed that falls due in an
// instant, as one is from a host whose clock is ahead. The next ones of its
// aggregate do not pass it.
func TestAlmostDueRowsKeepTheirPlace(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Mode, r.cfg.DelayThreshold = relay.ModePoll, time.Hour
	r.startAtWork()
	for n := 1; n < 20; n += 2 {
		r.exec(set{"available_at": `now() + interval '700 ms'`}.insert("outbox_messages", n, canonicalRow))
		r.put(n+1, n+1)
		time.Sleep(100 * time.Millisecond)
	}
	r.pending(0)
	r.storedIs(1, 20)
	r.exec(set{"available_at": `now() + interval '50 minutes'`}.insert("outbox_messages", 21, canonicalRow))
	r.put(22, 22)
	r.exec(set{"aggregate_id": `2`}.insert("outbox_messages", 23, canonicalRow))
	r.pending(2)
	r.storedIs(1, 20, 23, 23) // another aggregate does not wait
	r.exec(`UPDATE outbox_messages SET available_at = now() WHERE payload ->> 'n' = '21'`)
	r.pending(0)
	r.storedIs(1, 20, 23, 23, 21, 22)
}

// TestLargeRowsInTheTable: they are read a few at a time.
func TestLargeRowsInTheTable(t *testing.T) {
	t.Parallel()
	r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Process: true, Config: "max_payload: 8MB"}))
	r.cfg.Mode = relay.ModePoll
	rows := testenv.Size(t, 8, 30) // three at a time
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n, 'pad', repeat('x', 3000000)) FROM generate_series(1, $1::int) n`, rows)
	r.startAtWork()
	r.pending(0)
	r.storedIs(1, rows)
}
