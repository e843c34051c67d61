package relay_test

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

func TestIDsComeAgainAfterTruncate(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.keep()
	r.put(1, 50)
	r.pending(0)
	r.exec(`TRUNCATE outbox_messages RESTART IDENTITY`)
	r.put(51, 100)
	r.pending(0)
	// Once more, and before the rows of the last time can have been marked.
	taker := r.seize(putSQL, "order.placed", 101, 150)
	eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 150 })
	r.must(run(t.Context(), taker, "TRUNCATE outbox_messages RESTART IDENTITY; COMMIT"))
	r.put(151, 200)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 200)
	if ids := rowIDs(r.stored()[150:]); slices.Min(ids) != 1 || slices.Max(ids) != 50 {
		t.Fatalf("ids %d to %d, want 1 to 50 again", slices.Min(ids), slices.Max(ids))
	}
	x.quiet("events_lost", "phantoms", "foreign_message")

	// A restart that meets all four generations knows them apart.
	x.halt()
	r.rewind()
	x = r.start().streaming()
	r.put(201, 210)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 210)
	x.quiet("events_lost", "phantoms", "foreign_message")
}

// rowIDs are the ids of the rows that messages were made of.
func rowIDs(messages []*jetstream.RawStreamMsg) (ids []int) {
	for _, m := range messages {
		parts := strings.Split(m.Header.Get(nats.MsgIdHdr), "/")
		id, _ := strconv.Atoi(parts[len(parts)-2])
		ids = append(ids, id)
	}
	return ids
}

// TestPromotedStandbyLackedTheLastRows lets a primary crash whose standby had
// been away for a while: it lacks rows, and marks of rows that it has. It gives
// ids away once more that events in the stream already have, all within the
// duplicate window.
func TestPromotedStandbyLackedTheLastRows(t *testing.T) {
	t.Parallel()
	testenv.Clusters(t, func(t *testing.T, primary *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, primary)
		standby := primary.NewStandby(t, "sb", nil)
		db := r.query1(`SELECT current_database()::text`)
		r.cfg.PostgresURL = fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/%s?sslmode=disable&target_session_attrs=read-write",
			primary.Port(), standby.Port(), db)
		x := r.start().streaming()
		r.put(1, 20)
		r.pending(0)
		taker := r.seize(putSQL, "order.placed", 21, 30)
		eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 30 })
		eventually(t, "the standby has the rows", func() bool {
			return r.query1(`SELECT replay_lsn >= pg_current_wal_insert_lsn() FROM pg_stat_replication WHERE application_name = 'sb'`) == "true"
		})
		r.must(standby.Stop(t.Context(), testenv.Fast))
		// What follows never reaches it: first the marks, then some more rows.
		r.must(run(t.Context(), taker, "COMMIT"))
		r.pending(0)
		r.put(31, 100)
		r.pending(0)
		r.must(primary.Stop(t.Context(), testenv.Immediate))
		r.must(standby.Start(t.Context()))
		r.must(standby.Promote(t.Context()))
		r.pg, r.url = standby, standby.URL(db)

		x.alarmed("phantoms")
		x.streaming()
		r.put(101, 170)
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, 170)
		if a := x.alarmed("phantoms"); a["messages"] != int64(70) {
			t.Errorf("alarm %v, want 70 phantoms", a)
		}
		ids := rowIDs(r.stored())
		if phantoms, after := ids[30:100], ids[100:]; slices.Min(after) > slices.Max(phantoms) {
			t.Fatalf("ids go on at %d after phantoms up to %d: the test shows nothing", slices.Min(after), slices.Max(phantoms))
		}
		x.quiet("events_lost", "foreign_message", "rival", "stream_rolled_back")
	})
}

// TestPolledRowsAreNoPhantoms: a row that the standby has, and that the table
// delivered behind events that it never had, is not delivered again.
func TestPolledRowsAreNoPhantoms(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, primary *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, primary)
		r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
		standby := primary.NewStandby(t, "sb", nil)
		db := r.query1(`SELECT current_database()::text`)
		r.cfg.PostgresURL = fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/%s?sslmode=disable&target_session_attrs=read-write",
			primary.Port(), standby.Port(), db)
		r.cfg.FallbackInterval = 100 * time.Millisecond
		x := r.start().streaming()
		r.put(1, 20)
		r.exec(set{"occurred_at": `now() - interval '1 hour'`, "available_at": `now() + interval '1 hour'`}.insert("outbox_messages", 21, canonicalRow))
		r.pending(1)
		eventually(t, "the standby has the rows", func() bool {
			return r.query1(`SELECT replay_lsn >= pg_current_wal_insert_lsn() FROM pg_stat_replication WHERE application_name = 'sb'`) == "true"
		})
		r.must(standby.Stop(t.Context(), testenv.Fast))
		r.put(1001, 1010) // these it never gets, and the mark of the delayed one
		r.pending(1)
		r.exec(`UPDATE outbox_messages SET available_at = now() WHERE processed_at IS NULL`)
		r.pending(0)
		if !slices.Equal(r.numbers(), span(1, 20, 1001, 1010, 21, 21)) {
			t.Fatalf("stored %v: the test shows nothing", r.numbers())
		}
		r.must(primary.Stop(t.Context(), testenv.Immediate))
		r.must(standby.Start(t.Context()))
		r.must(standby.Promote(t.Context()))
		r.pg, r.url = standby, standby.URL(db)
		x.streaming()
		r.put(22, 30)
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, 20, 1001, 1010, 21, 30)
		if a := x.alarmed("phantoms"); a["messages"] != int64(10) {
			t.Errorf("alarm %v, want 10 phantoms", a)
		}
		x.quiet("events_lost", "foreign_message", "rival", "stream_rolled_back", "missed_rows")
	})
}

// TestRowsBeforeTheSlot: what was committed before the slot existed is not in its
// WAL, and is delivered from the table, in its place.
func TestRowsBeforeTheSlot(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.put(1, 300)
	x := r.start().streaming()
	r.storedIs(1, 300)
	r.put(301, 305)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 305)
	x.quiet("missed_rows", "slot_given_up")
}

// TestFailoverSlotGoesOn: a slot that was synchronised is as good as the old one.
func TestFailoverSlotGoesOn(t *testing.T) {
	t.Parallel()
	testenv.ClustersWith(t, testenv.PGOptions{}, func(t *testing.T, primary *testenv.Postgres) {
		if primary.Version() < 17 {
			t.Skip("failover slots came with 17")
		}
		t.Parallel()
		r := newRig(t, primary)
		standby := primary.NewStandby(t, "sb", map[string]string{"sync_replication_slots": "on"})
		r.must(primary.Reload(t.Context(), map[string]string{"synchronized_standby_slots": "sb"}))
		db := r.query1(`SELECT current_database()::text`)
		r.cfg.PostgresURL = fmt.Sprintf("postgres://postgres@127.0.0.1:%d,127.0.0.1:%d/%s?sslmode=disable&target_session_attrs=read-write",
			primary.Port(), standby.Port(), db)
		x := r.start().streaming()
		n := 0
		there := *r
		there.pg, there.url = standby, standby.URL(db)
		eventually(t, "the standby has the slot", func() bool {
			n++
			r.put(n, n)
			r.exec(`CHECKPOINT`) // the slot's restart_lsn moves on
			return there.query1(`SELECT count(*) FROM pg_replication_slots WHERE slot_name = $1 AND synced AND NOT temporary
				AND invalidation_reason IS NULL`, r.cfg.Slot) == "1"
		})
		r.must(primary.Stop(t.Context(), testenv.Immediate))
		r.must(standby.Promote(t.Context()))
		r.pg, r.url = there.pg, there.url
		r.put(n+1, n+10)
		r.pending(0)
		r.passes(r.here())
		r.storedIs(1, n+10)
		x.quiet("events_lost", "missed_rows", "phantoms", "foreign_message", "rival")
	})
}
