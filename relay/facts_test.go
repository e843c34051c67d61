package relay_test

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestIDTypeChangesUnderTheRelay: the id column gets another type while a relay runs, and
// the ids outgrow the old one. Every row is delivered once, in its order, and marked.
func TestIDTypeChangesUnderTheRelay(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeAuto, relay.ModePoll} {
		for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete} {
			t.Run(string(mode)+" "+string(mark), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.cfg.Mode, r.cfg.Outboxes[0].Mark = mode, mark
				r.cfg.FallbackInterval = 500 * time.Millisecond
				r.exec(`ALTER TABLE outbox_messages ALTER id TYPE integer`)
				x := r.startAtWork()
				r.put(1, 10)
				r.pending(0)
				r.exec(`ALTER TABLE outbox_messages ALTER id TYPE bigint; ALTER TABLE outbox_messages ALTER id RESTART WITH 3000000000`)
				r.put(11, 30)
				r.pending(0)
				r.storedIs(1, 30)
				r.exec(`ALTER TABLE outbox_messages ALTER id DROP IDENTITY; ALTER TABLE outbox_messages ALTER id TYPE text`)
				r.exec(`INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) VALUES ('row-31', 'order', 1, 'order.placed', '{"n": 31}')`)
				r.pending(0)
				r.storedIs(1, 31)
				x.quiet("row_unsettled", "missed_rows", "events_lost")
			})
		}
	}
}

// TestNullDueTimeUnderTheRelay: available_at becomes nullable while a relay polls. A row
// without one is due at once, parked or not, and no later row of its aggregate passes it.
func TestNullDueTimeUnderTheRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Mode, r.cfg.FallbackInterval = relay.ModePoll, 100*time.Millisecond
	r.cfg.Retry = table.Retry{Backoff: time.Hour, MaxAttempts: 10}
	r.startAtWork()
	r.put(1, 1)
	r.pending(0)
	r.exec(`ALTER TABLE outbox_messages ALTER available_at DROP NOT NULL`)
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
		VALUES ('order', 1, 'order.placed', '{"n": 2}', NULL), ('order', 1, 'order.placed', '{"n": 3}', now())`)
	r.pending(0)
	r.storedIs(1, 3)
	r.exec(putSQL, "not a subject", 4, 4)
	eventually(t, "the row is parked", func() bool { return r.count(`SELECT count(*) FROM outbox_messages WHERE attempts = 1`) == 1 })
	r.exec(`UPDATE outbox_messages SET event_type = 'order.placed', available_at = NULL WHERE attempts = 1`)
	eventually(t, "the parked row is stored", func() bool { return r.storedCount() == 4 })
	r.storedIs(1, 4)
}

// TestSlotWaitsForColumns: the WAL no longer brings a column that the layout names. The slot is given
// up once, the tables are polled, also the other outbox, and the slot is there again with the column.
func TestSlotWaitsForColumns(t *testing.T) {
	t.Parallel()
	for column, change := range map[string]struct{ sql, undo, hint string }{
		"trace_id": {
			`ALTER TABLE outbox_messages DROP COLUMN trace_id;
				ALTER TABLE outbox_messages ADD COLUMN trace_id text GENERATED ALWAYS AS (event_type) STORED`,
			`ALTER TABLE outbox_messages ALTER trace_id DROP EXPRESSION`, "have a trigger fill",
		},
		"attempts": {
			`ALTER TABLE outbox_messages RENAME attempts TO tries`,
			`ALTER TABLE outbox_messages RENAME tries TO attempts`, "add the columns",
		},
	} {
		t.Run(column, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.FallbackInterval = 500 * time.Millisecond
			r.addSecond()
			x := r.start().streaming()
			r.put(1, 3)
			r.pending(0)
			r.exec(change.sql)
			r.put(4, 6)
			a := x.alarmed("slot_not_made")
			if !contains(a["error"], strconv.Quote(column)) || !contains(a["hint"], change.hint) {
				t.Errorf("the alarm does not say what is wrong with %s: %v", column, a)
			}
			r.putSecond(11, 13)
			eventually(t, "the status says why", func() bool {
				s := x.Status()
				return s.State == "polling" && strings.Contains(s.LastError, strconv.Quote(column))
			})
			r.exec(change.undo)
			x.streaming()
			r.put(7, 9)
			r.pending(0)
			r.passes(r.here())
			if n := r.storedCount(); n != 12 {
				t.Errorf("%d messages are stored, want 12", n)
			}
			if n := x.metric("walpost_alarms_total", "alarm", "slot_given_up"); n != 1 {
				t.Errorf("the slot was given up %v times", n)
			}
			x.quiet("no_progress", "unpublished")
		})
	}
}

// TestRenamedColumnIsSaid: while nothing is inserted into a table whose column was renamed, the other outbox is
// delivered. A row ends that, and whatever says so names the table, the column and the remedy.
func TestRenamedColumnIsSaid(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 500 * time.Millisecond
	r.addSecond()
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.exec(`ALTER TABLE outbox_messages RENAME payload TO body`)
	x.alarmed("table_unfit")
	r.putSecond(11, 13)
	x.quiet("unpublished", "no_progress")
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, body) VALUES ('order', 1, 'order.placed', '{"n": 4}')`)
	a := x.alarmed("no_progress")
	const lacks = `table public.outbox_messages lacks what layout "canonical" needs: "payload"`
	if !contains(a["error"], lacks) || !contains(a["hint"], "add the columns") {
		t.Errorf("the alarm does not say what is wrong: %v", a)
	}
	eventually(t, "the status says what is wrong", func() bool { return strings.Contains(x.Status().LastError, lacks) })
	r.exec(`ALTER TABLE outbox_messages RENAME body TO payload`)
	x.streaming()
	r.put(5, 7)
	r.pending(0)
	r.putSecond(14, 16)
	r.storedIs(1, 3, 11, 13, 4, 7, 14, 16)
}

// addSecond adds the outbox of putSecond.
func (r *rig) addSecond() {
	r.t.Helper()
	second := *r.cfg.Outboxes[0]
	second.Name = "second_outbox"
	r.exec(`CREATE TABLE second_outbox (LIKE outbox_messages INCLUDING ALL)`)
	r.cfg.Outboxes = append(r.cfg.Outboxes, &second)
}
