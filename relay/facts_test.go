package relay_test

import (
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

// addSecond adds the outbox of putSecond.
func (r *rig) addSecond() {
	r.t.Helper()
	second := *r.cfg.Outboxes[0]
	second.Name = "second_outbox"
	r.exec(`CREATE TABLE second_outbox (LIKE outbox_messages INCLUDING ALL)`)
	r.cfg.Outboxes = append(r.cfg.Outboxes, &second)
}
