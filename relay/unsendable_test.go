package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// breakTimes makes a number a timestamp that has no text: the server fails with 22008
// where it renders one. A walsender sends every column, mapped or not.
const breakTimes = `CREATE CAST (bigint AS timestamptz) WITHOUT FUNCTION;
	CREATE FUNCTION broken() RETURNS timestamptz LANGUAGE sql AS 'SELECT (-9000000000000000000)::bigint::timestamptz'`

// TestRowThatTheServerCannotSend: the walsender fails at one row each time it comes
// there. The slot is made again behind it, the table delivers what it can send, and a
// row that it cannot send either is recorded, and in the end dead.
func TestRowThatTheServerCannotSend(t *testing.T) {
	t.Parallel()
	rows := map[string]struct {
		prepare, insert string
		// failure is what is recorded of the row, "" where the table delivers it.
		failure string
	}{
		"a column that is not mapped": {
			prepare: `ALTER TABLE outbox_messages ADD extra timestamptz`,
			insert:  `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, extra) VALUES ('bad', 1, 'order.placed', '{"n": 1000}', broken())`,
		},
		"a mapped column": {
			prepare: `ALTER TABLE outbox_messages ALTER trace_id TYPE timestamptz USING NULL`,
			insert:  `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, trace_id) VALUES ('bad', 1, 'order.placed', '{"n": 1000}', broken())`,
			failure: "unreadable: ",
		},
		"a gigabyte of digits": {
			insert: `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'bad', 1, 'order.placed', jsonb_agg('1e131071'::jsonb) FROM generate_series(1, 8300)`,
			failure: "size: ",
		},
	}
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1}
			r.exec(breakTimes + ";" + row.prepare)
			x := r.start().streaming()
			r.put(1, 5)
			// In one transaction, and in others behind it.
			r.exec(`BEGIN; INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 6, 'order.placed', '{"n": 6}');` +
				row.insert + `; INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 7, 'order.placed', '{"n": 7}'); COMMIT`)
			r.put(8, 10)
			behind := r.here()
			x.alarmed("unsendable")
			if row.failure == "" {
				r.pending(0)
				r.storedIs(1, 6, 1000, 1000, 7, 10)
			} else {
				eventually(t, "the others are stored", func() bool { return r.storedCount() >= 10 })
				r.storedIs(1, 10)
				eventually(t, "the row is a dead letter", func() bool { return r.query1(`SELECT count(*) FROM outbox_messages_dlq`) == "1" })
				letter := r.query1(`SELECT concat(outbox, ' ', row_id, ' ', last_error) FROM outbox_messages_dlq`)
				if want := "public.outbox_messages " + r.query1(`SELECT id FROM outbox_messages WHERE aggregate_type = 'bad'`) + " " + row.failure; !strings.HasPrefix(letter, want) {
					t.Errorf("the dead letter is %q, want %q", letter, want)
				}
				if kept := r.query1(`SELECT last_error FROM outbox_messages WHERE aggregate_type = 'bad'`); !strings.HasPrefix(kept, table.Kept+row.failure) {
					t.Errorf("the row is kept with %q", kept)
				}
			}
			x.streaming()
			r.passes(behind)
			r.put(11, 20)
			eventually(t, "the WAL delivers again", func() bool { return r.storedCount() >= 20 })
			if n := x.metric("walpost_slots_created_total"); n != 2 {
				t.Errorf("%v slots were made, want 2", n)
			}
			x.halt()
			x = r.start().streaming()
			r.put(21, 30)
			eventually(t, "a start is not held up", func() bool { return r.storedCount() >= 30 })
			x.quiet("slot_given_up", "events_lost", "row_unsettled", "unsendable")
		})
	}
}

// TestPollingPastARowThatTheServerCannotSend: the search of the table, too, goes on around it.
func TestPollingPastARowThatTheServerCannotSend(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.Mode = relay.ModePoll
	r.exec(breakTimes + `; ALTER TABLE outbox_messages ALTER trace_id TYPE timestamptz USING NULL`)
	r.put(1, 20)
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, trace_id) VALUES
		('bad', 1, 'order.placed', '{"n": 1000}', broken()), ('bad', 1, 'order.placed', '{"n": 1001}', NULL), ('bad', 2, 'order.placed', '{"n": 1002}', broken())`)
	r.put(21, 40)
	r.start()
	eventually(t, "three rows are recorded", func() bool {
		return r.query1(`SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL`) == "3"
	})
	r.pending(0)
	r.storedIs(1, 40)
	got := r.query1(`SELECT string_agg(concat_ws('|', payload ->> 'n', attempts, split_part(last_error, ':', 1)), ' ' ORDER BY id) FROM outbox_messages WHERE last_error IS NOT NULL`)
	if want := "1000|1|unreadable 1001|0|held 1002|1|unreadable"; got != want {
		t.Errorf("recorded are %s, want %s", got, want)
	}
}
