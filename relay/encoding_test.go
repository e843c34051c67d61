package relay_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// encoded is newRig with a database of another encoding.
func encoded(t *testing.T, encoding string) *rig {
	t.Helper()
	r := newRig(t, testenv.SharedPostgres(t))
	name := r.query1(`SELECT current_database()::text`) + "_" + strings.ToLower(encoding)
	r.must(r.pg.Exec(t.Context(), "postgres", fmt.Sprintf(`CREATE DATABASE %s TEMPLATE template0 ENCODING '%s' LC_COLLATE 'C' LC_CTYPE 'C'`, name, encoding)))
	r.url = r.pg.URL(name)
	r.cfg.PostgresURL = r.url
	r.migrate(r.cfg.Outboxes[0])
	return r
}

// latin1 inserts row n with a byte in a column that is no UTF-8: 'é' in the encoding
// LATIN1, which the server cannot send to a client that wants UTF-8.
func (r *rig) latin1(n int, column string) {
	r.t.Helper()
	c := r.conn()
	r.must(run(r.t.Context(), c, `SET client_encoding = 'SQL_ASCII'`))
	row := set{column: `convert_from('\xe9', 'SQL_ASCII')`}
	if column == "payload" {
		row[column] = `jsonb_build_object('n', N, 'x', convert_from('\xe9', 'SQL_ASCII'))`
	}
	r.must(run(r.t.Context(), c, row.insert("outbox_messages", n, canonicalRow)))
}

// TestRowThatIsNoUTF8: a database without an encoding has any bytes in its text. The row
// is parked, and the relay, its restarts, and the commands go on around it.
func TestRowThatIsNoUTF8(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		for _, column := range []string{"payload", "aggregate_type", "event_type", "trace_id"} {
			t.Run(string(mode)+"/"+column, func(t *testing.T) {
				t.Parallel()
				r := encoded(t, "SQL_ASCII")
				r.cfg.Mode, r.cfg.OnPoison = mode, fallback.Skip
				x := r.start()
				r.put(1, 50)
				r.latin1(1000, column)
				r.put(51, 100)
				r.pending(0)
				r.storedIs(1, 100)
				parked := r.query1(`SELECT last_error FROM outbox_messages WHERE last_error IS NOT NULL`)
				want := "encoding: " + column + ": byte "
				if column == "event_type" {
					want = "subject: "
				}
				if !strings.HasPrefix(parked, want) {
					t.Errorf("the row is parked with %q, want %s", parked, want)
				}
				x.halt()
				x = r.start()
				r.put(101, 110)
				r.pending(0)
				r.storedIs(1, 110)
				if report := r.verify(); report.Faults() > 0 {
					t.Errorf("verify found %d faults: %v", report.Faults(), report)
				}
				x.quiet("slot_given_up", "events_lost", "row_unsettled")
			})
		}
	}
}

// TestDeadLetterThatIsNoUTF8: without columns for failures the row becomes one at once.
func TestDeadLetterThatIsNoUTF8(t *testing.T) {
	t.Parallel()
	r := encoded(t, "SQL_ASCII")
	r.cfg.Outboxes[0].Layout.Columns[outbox.Attempts] = ""
	r.start().streaming()
	r.put(1, 50)
	r.latin1(1000, "payload")
	r.put(51, 100)
	r.passes(r.here())
	r.storedIs(1, 100)
	if n := r.query1(`SELECT count(*) FROM outbox_messages_dlq WHERE encode(convert_to(original::text, 'SQL_ASCII'), 'escape') LIKE '%\\351%'`); n != "1" {
		t.Errorf("%s dead letters have the bytes as they were, want 1", n)
	}
}
