package relay_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// shape is an outbox of one layout and mark, and how a producer writes to it.
type shape struct {
	table *outbox.Table
	row   set
	// eventType is the column of that name.
	eventType string
}

var shapes = map[string]func(r *rig) shape{
	"canonical": func(r *rig) shape {
		return shape{table: r.cfg.Outboxes[0], row: canonicalRow, eventType: "event_type"}
	},
	"debezium": func(r *rig) shape {
		r.exec(`CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype varchar(255) NOT NULL,
			aggregateid varchar(255) NOT NULL, type varchar(255) NOT NULL, payload jsonb)`)
		return shape{
			table: &outbox.Table{Schema: "public", Name: "outbox", Layout: outbox.Debezium(), Mark: outbox.MarkDelete},
			row:   set{"aggregatetype": `'order'`, "aggregateid": `'A-1'`, "type": `'order.placed'`}, eventType: "type",
		}
	},
}

// commit writes rows in one transaction.
func (s shape) commit(r *rig, inserts ...string) {
	r.t.Helper()
	r.exec(strings.Join(inserts, "; "))
}

func (s shape) insert(n int, more set) string { return more.insert(s.table.SQL(), n, s.row) }

// commitBetween writes the bad row five times, each between good ones: first in
// transactions of their own, then in one. It returns how many good ones there
// are then.
func (s shape) commitBetween(r *rig, good int, bad set) int {
	r.t.Helper()
	var together []string
	for i := range 5 {
		rows := []string{s.insert(good, nil), s.insert(good+1, nil), s.insert(1000+i, bad), s.insert(good+2, nil)}
		good += 3
		if i >= 2 {
			together = append(together, rows...)
			continue
		}
		for _, row := range rows {
			s.commit(r, row)
		}
	}
	s.commit(r, together...)
	return good
}

// recorded are the numbers and errors of the rows that are parked, or dead.
func (s shape) recorded(r *rig) (numbers []int, errors []string) {
	r.t.Helper()
	sql := `SELECT (payload ->> 'n')::int, last_error FROM outbox_messages WHERE last_error IS NOT NULL AND processed_at IS NULL AND attempts = 1
		AND available_at > occurred_at + interval '30 seconds' ORDER BY 1`
	if !s.table.Layout.Records() {
		sql = fmt.Sprintf(`SELECT ((original ->> 'payload')::jsonb ->> 'n')::int, last_error FROM outbox_messages_dlq
			WHERE outbox = '%s' AND row_id = original ->> 'id' AND event_type = original ->> '%s' AND attempts = 1 ORDER BY 1`, s.table, s.eventType)
	}
	rows, err := r.conn().Query(r.t.Context(), sql)
	r.must(err)
	var n int
	var text string
	_, err = pgx.ForEachRow(rows, []any{&n, &text}, func() error {
		numbers, errors = append(numbers, n), append(errors, text)
		return nil
	})
	r.must(err)
	return numbers, errors
}

// TestRowsThatTheServerRefuses has rows that only JetStream, or the server's
// authorization, knows to be bad, in the midst of others that are in flight.
func TestRowsThatTheServerRefuses(t *testing.T) {
	t.Parallel()
	refusals := map[string]struct {
		bad       set
		eventType string
		class     string
		says      string // of what the server said
		start     func(t *testing.T, r *rig) *running
	}{
		"too large": {
			bad: set{"payload": `jsonb_build_object('n', N, 'x', repeat('x', 4000))`}, eventType: "order.placed", class: "size", says: "10054",
			start: func(t *testing.T, r *rig) *running {
				x := r.start().streaming()
				s, err := r.js().Stream(t.Context(), "EVENTS")
				r.must(err)
				cfg := s.CachedInfo().Config
				cfg.MaxMsgSize = 2000
				_, err = r.js().UpdateStream(t.Context(), cfg)
				r.must(err)
				return x
			},
		},
		"not permitted": {
			bad: set{"TYPE": `'order.secret'`}, eventType: "order.secret", class: "permission", says: "events.order.secret",
			start: func(t *testing.T, r *rig) *running {
				r.cfg.NATS.User, r.cfg.NATS.PasswordFile = "relay", filepath.Join(t.TempDir(), "password")
				r.must(os.WriteFile(r.cfg.NATS.PasswordFile, []byte("secret"), 0o600))
				return r.start().streaming()
			},
		},
	}
	for refusal, want := range refusals {
		for name, newShape := range shapes {
			t.Run(refusal+"/"+name, func(t *testing.T) {
				t.Parallel()
				r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Config: usersConfig}))
				r.cfg.OnPoison = fallback.Skip // the good rows are of the same aggregate
				r.createStream(nil)
				s := newShape(r)
				r.cfg.Outboxes = []*outbox.Table{s.table}
				x := want.start(t, r)
				r.keep()
				good := s.commitBetween(r, 0, s.adapt(want.bad))
				s.allSettled(r, good)

				bad, errors := s.recorded(r)
				if got := brief(bad); got != "[1000-1004]" {
					t.Fatalf("recorded %s, want [1000-1004]: %q", got, errors)
				}
				if all := strings.Join(errors, "\n"); !strings.Contains(all, want.says) || strings.Count(all, want.class+": ") != 5 {
					t.Errorf("recorded errors do not say %q: %s", want.says, all)
				}
				// A row that the next session meets again counts again.
				if n := x.metric("outbox_failures_total", "class", want.class, "event_type", want.eventType); n < 5 {
					t.Errorf("outbox_failures_total of class %s is %v, want 5 or more", want.class, n)
				}

				x.halt()
				r.rewind()
				r.start().streaming()
				s.commit(r, s.insert(good, nil))
				s.allSettled(r, good+1)
				if again, errors := s.recorded(r); brief(again) != brief(bad) {
					t.Errorf("recorded %s after a restart, want %s: %q", brief(again), brief(bad), errors)
				}
			})
		}
	}
}

// allSettled waits until the LSN has passed everything, and wants the good rows
// in the stream by then.
func (s shape) allSettled(r *rig, good int) {
	r.t.Helper()
	r.passes(r.here())
	r.storedIs(0, good-1)
}

// adapt makes a row of a shape that the columns' names belong to.
func (s shape) adapt(row set) set {
	own := set{}
	for column, value := range row {
		if column == "TYPE" {
			column = s.eventType
		}
		own[column] = value
	}
	return own
}

// usersConfig lets everybody in, and the user named relay publish on every
// subject but one.
const usersConfig = `
authorization {
	users = [
		{ user: anybody, password: secret }
		{ user: relay, password: secret, permissions: { publish: { deny: "events.order.secret" } } }
	]
}
no_auth_user: anybody
`

// TestDeadLetterIsTheWholeRow: what is moved can be put back as it was.
func TestDeadLetterIsTheWholeRow(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	s := shapes["debezium"](r)
	r.cfg.Outboxes = []*outbox.Table{s.table}
	r.exec(`ALTER TABLE outbox ADD note text DEFAULT 'not mapped', ADD amount numeric DEFAULT 1.50`)
	r.start().streaming()
	want := r.query1(s.insert(7, set{"type": `E'\t'`}) + " RETURNING row_to_json(outbox)::text")
	r.passes(r.here())
	if got := r.query1(`SELECT original::text FROM outbox_messages_dlq`); got != want {
		t.Errorf("dead letter %s, want %s", got, want)
	}
	if n := r.query1(`SELECT count(*) FROM outbox`); n != "0" {
		t.Errorf("%s rows are in the outbox beside their dead letters", n)
	}
}
