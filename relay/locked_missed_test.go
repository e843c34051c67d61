package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// putAggregatesSQL commits events of the aggregates 0 to 3 in turn.
const putAggregatesSQL = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
	SELECT 'order', n % 4, 'order.placed', jsonb_build_object('n', n) FROM generate_series($1::int, $2::int) n ORDER BY n`

// TestLockedRowInTheTable: somebody has forgotten a row lock, and the poller has to
// deliver that row and others, because the WAL does not bring them. It delivers the
// others, keeps the aggregate's order, and names the holder.
func TestLockedRowInTheTable(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		for name, mode := range map[string]relay.Mode{"streaming": relay.ModeAuto, "polling": relay.ModePoll} {
			t.Run(name, func(t *testing.T) { // one after the other: while a transaction is open no slot can be created
				testLockedRow(t, pg, mode)
			})
		}
	})
}

func testLockedRow(t *testing.T, pg *testenv.Postgres, mode relay.Mode) {
	r := newRig(t, pg)
	r.exec(`CREATE TABLE audit (LIKE outbox_messages INCLUDING ALL)`)
	r.cfg.FallbackInterval = 200 * time.Millisecond
	r.cfg.Outboxes = append(r.cfg.Outboxes, &outbox.Table{Schema: "public", Name: "audit", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate})
	r.start().streaming().halt()
	r.exec(putAggregatesSQL, 1, 40)
	holder := r.forgotten(18) // of aggregate 2
	r.exec(`SELECT pg_replication_slot_advance($1, pg_current_wal_lsn())`, r.cfg.Slot)
	r.cfg.Mode = mode
	x := r.start()
	// 18, 22, 26, 30, 34, 38 wait.
	r.pending(6)
	if who := fmt.Sprint(x.alarmed("row_locked")["holder"]); !strings.HasPrefix(who, fmt.Sprintf("pid %d,", holder.PgConn().PID())) {
		t.Errorf("the alarm names %q, want pid %d", who, holder.PgConn().PID())
	}
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', 3, 'order.placed', jsonb_build_object('n', n) FROM generate_series(41, 50) n`)
	r.pending(6)  // live rows are not held up
	r.inOrder(44) // none of the six
	r.must(run(t.Context(), holder, "ROLLBACK"))
	r.pending(0)
	r.inOrder(50)
	x.halt()
	want := 40.0
	if mode == relay.ModePoll {
		want = 0
	}
	if n := x.metric("walpost_missed_rows_total"); n != want {
		t.Errorf("%v rows were missed, want %v", n, want)
	}
}

// inOrder wants so many messages in the stream, and each aggregate's numbers rising.
func (r *rig) inOrder(want int) {
	r.t.Helper()
	last := map[string]int{}
	messages := r.stored()
	for i, n := range numbersOf(r.t, messages) {
		of := messages[i].Header.Get("ce-aggregateid")
		if n <= last[of] {
			r.t.Errorf("row %d of aggregate %s follows row %d", n, of, last[of])
		}
		last[of] = n
	}
	if len(messages) != want {
		r.t.Errorf("stored %d messages, want %d", len(messages), want)
	}
}

// TestLockedRowOfAHeldAggregate: a row cannot be recorded as held because somebody
// has it locked. When the cause of the hold is gone, the rows behind it wait for it.
func TestLockedRowOfAHeldAggregate(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.cfg.FallbackInterval = 200 * time.Millisecond
		r.start().streaming().halt()
		r.exec(set{"event_type": `'order placed'`}.insert("outbox_messages", 1, canonicalRow))
		r.put(2, 10)
		holder := r.forgotten(5)
		x := r.start()
		eventually(t, "the rows before the locked one are held", func() bool { return r.count(heldRows) == 3 })
		r.exec(`UPDATE outbox_messages SET event_type = 'order.placed', available_at = now() WHERE payload ->> 'n' = '1'`)
		eventually(t, "the rows before the locked one are stored", func() bool { return r.storedCount() >= 4 })
		if who := fmt.Sprint(x.alarmed("row_locked")["holder"]); !strings.HasPrefix(who, fmt.Sprintf("pid %d,", holder.PgConn().PID())) {
			t.Errorf("the alarm names %q, want pid %d", who, holder.PgConn().PID())
		}
		r.storedIs(1, 4)
		r.must(run(t.Context(), holder, "ROLLBACK"))
		eventually(t, "every hold has ended", func() bool { return x.metric("walpost_held_aggregates") == 0 && r.count(heldRows) == 0 })
		r.pending(0)
		r.storedIs(1, 10)
		x.over("row_locked")
	})
}
