package relay_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
	"github.com/walpost/walpost/stream"
)

// deadRig is a table with a status and one dead row, n = 1.
func deadRig(t *testing.T, e existing) (*rig, *running) {
	t.Helper()
	r := existingRig(t, e, relay.ModeStream)
	r.cfg.Retry = table.Retry{Backoff: 20 * time.Millisecond, MaxAttempts: 2}
	x := r.begin()
	r.exec(e.insert, "a1", "payment.made", 1)
	eventually(t, "the row is dead", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 1 })
	return r, x
}

// TestPurgedDeadRow: a dead row that somebody has deleted comes back from its dead letter, as a pending one.
func TestPurgedDeadRow(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"eventferry", "status"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := existingTables[name]
			r, x := deadRig(t, e)
			r.exec(fmt.Sprintf(`DELETE FROM %s`, r.cfg.Outboxes[0].SQL()))
			x.halt()
			r.listenToAll()
			x = r.begin()
			r.retryAll()
			r.settled(e, 1)
			x.halt()
			if n := r.storedCount(); n != 1 {
				t.Errorf("%d messages are stored, want 1", n)
			}
		})
	}
}

// TestRetriedDeadRow: a dead row that is tried again has no attempts behind it.
func TestRetriedDeadRow(t *testing.T) {
	t.Parallel()
	e := existingTables["status"]
	r, x := deadRig(t, e)
	x.halt()
	r.retryAll()
	if n := r.left("state = 'failed' AND tries = 0 AND why LIKE 'held: %'"); n != 1 {
		t.Errorf("the row is %s", r.query1(`SELECT concat_ws(' ', state, tries, why) FROM messages`))
	}
}

// TestStatusTypes: a status of any type of PostgreSQL's own is told by its text, or refused.
func TestStatusTypes(t *testing.T) {
	t.Parallel()
	for typ, c := range map[string]struct{ done, failed, dead, refused string }{
		"char(10)":      {done: "sent", failed: "failed", dead: "dead"},
		"numeric(10,2)": {done: "2", failed: "3", dead: "4"},
		"varchar(5)":    {done: "delivered", failed: "fail", dead: "dead", refused: "table-status"},
		"real":          {done: "2", failed: "3.5", dead: "4"},
	} {
		t.Run(typ, func(t *testing.T) {
			t.Parallel()
			e := existingTables["status"]
			e.create = strings.NewReplacer("state state NOT NULL DEFAULT 'new'", "state "+typ, "CREATE TYPE state AS ENUM ('new', 'sent', 'failed', 'dead');", "").Replace(e.create)
			r := existingRig(t, e, relay.ModeStream)
			r.cfg.Outboxes[0].Layout.States = [outbox.NumStates]string{c.done, c.failed, c.dead}
			r.cfg.Retry = table.Retry{Backoff: 20 * time.Millisecond, MaxAttempts: 1000}
			x := r.start()
			if c.refused != "" {
				x.ends()
				if hint.CodeOf(x.err) != c.refused {
					t.Errorf("%v", x.err)
				}
				return
			}
			x.streaming()
			r.exec(`INSERT INTO messages (key, about, kind, body, state, sent) VALUES ('x', 'a2', 'order.placed', '{}', '` + c.done + `', now())`)
			r.exec(e.insert, "a1", "payment.made", 1)
			eventually(t, "a failure is recorded", func() bool { return r.left("tries > 0") == 1 })
			r.listenToAll()
			eventually(t, "the failed row is stored", func() bool { return r.storedCount() == 1 })
			x.halt()
		})
	}
}

// TestForeignRecords: what another relay has written of a failure does not keep a row back.
func TestForeignRecords(t *testing.T) {
	t.Parallel()
	e := existingTables["prisma"]
	r := existingRig(t, e, relay.ModeStream)
	for i, why := range []string{"retry after 30 seconds: 429 Too Many Requests", "retry after 9999-99-99Tnonsense: x", "connection refused", ""} {
		r.exec(`INSERT INTO "OutboxEvent" (id, "aggregateType", "aggregateId", "eventType", payload, attempts, "lastError") VALUES ($1::text, 'order', $1, 'order.placed', '{}', 1, $2)`, fmt.Sprint(i), why)
	}
	x := r.begin()
	r.settled(e, 4)
	x.halt()
}

// TestConditionsThatAreRefused: those that a relay would change the answer of by what it writes, and those
// that call what is not PostgreSQL's own.
func TestConditionsThatAreRefused(t *testing.T) {
	t.Parallel()
	r := existingRig(t, existingTables["eventferry"], relay.ModePoll)
	r.exec(`CREATE TYPE mood AS ENUM ('ok', 'bad'); ALTER TABLE outbox ADD COLUMN mood mood DEFAULT 'ok'`)
	box := r.cfg.Outboxes[0]
	db, err := table.Open(t.Context(), table.Config{URL: r.url})
	r.must(err)
	defer db.Close()
	for where, refused := range map[string]bool{
		"status <> 9": false, "status <> 9 AND topic <> 'x'": false, "status IN (0, 1, 2, 3)": false, "topic LIKE 'orders.%' OR topic IS NULL": false,
		"status = 0": true, "status <> 3 AND status <> 4": true, "status <> 2": true, "status IS NULL": true, "status = 2 AND topic = 'x' OR status <> 2": true,
		"attempts < 5": true, "processed_at IS NULL": true, "next_retry_at IS NULL AND topic = 'x'": true,
		"mood::text <> 'bad'": true, "mood <> 'bad'": true, "topic::public.mood <> 'bad'": true,
	} {
		box.Where, box.Filter = where, ""
		if err := db.CheckTable(t.Context(), box); (hint.CodeOf(err) == "table-where") != refused {
			t.Errorf("%s: %v (%s)", where, err, hint.Of(err))
		}
	}
}

// TestOtherFilter: a publication that filters by another condition is told, however alike the two look.
func TestOtherFilter(t *testing.T) {
	t.Parallel()
	for _, c := range [][2]string{
		{"(status = 0 OR status = 1) AND topic = 'x'", "status = 0 OR (status = 1 AND topic = 'x')"},
		{"topic <> 'Audit'", "topic <> 'audit'"},
		{"topic <> 'a b'", "topic <> 'ab'"},
	} {
		r := existingRig(t, existingTables["eventferry"], relay.ModeStream)
		conn := r.conn()
		for i, where := range c {
			r.cfg.Outboxes[0].Where = where
			if i == 0 {
				_, err := stream.EnsurePublication(t.Context(), conn, "existing", r.cfg.Outboxes)
				r.must(err)
			}
			p, err := stream.PublicationProblems(t.Context(), conn, "existing", r.cfg.Outboxes)
			r.must(err)
			if len(p) != i {
				t.Errorf("the publication is by %s, the condition %s: %v", c[0], where, p)
			}
		}
	}
}

// TestUnfitBetweenListAndFetch: a row that does not fit any more is not sent.
func TestUnfitBetweenListAndFetch(t *testing.T) {
	t.Parallel()
	e := existingTables["eventferry"]
	r := existingRig(t, e, relay.ModePoll)
	box := r.cfg.Outboxes[0]
	box.Where = "partition_key IS DISTINCT FROM 'cancelled'"
	r.exec(e.insert, "a1", "order.placed", 1)
	db, err := table.Open(t.Context(), table.Config{URL: r.url})
	r.must(err)
	defer db.Close()
	r.must(db.CheckTable(t.Context(), box))
	listed, err := db.Fresh(t.Context(), box, time.Second, 10)
	r.must(err)
	r.exec(`UPDATE outbox SET partition_key = 'cancelled'`)
	fetched, err := db.Fetch(t.Context(), box, []string{listed[0].ID}, 1<<20)
	r.must(err)
	if len(listed) != 1 || len(fetched.Rows) != 0 {
		t.Errorf("%d rows are listed and %d fetched, want 1 and 0", len(listed), len(fetched.Rows))
	}
}

// TestNamesOfColumnsInHeaders: whatever a column is called, a message can be read.
func TestNamesOfColumnsInHeaders(t *testing.T) {
	t.Parallel()
	e := existingTables["eventferry"]
	r := existingRig(t, e, relay.ModeStream)
	names := []string{"a b", "c:d", "ü", "e\r\nX-Injected: yes"}
	var headers []outbox.Header
	for _, name := range names {
		r.exec(`ALTER TABLE outbox ADD COLUMN ` + outbox.QuoteIdent(name) + ` text DEFAULT 'v'`)
		headers = append(headers, outbox.Header{Column: name})
	}
	r.cfg.Outboxes[0].Layout.SetHeaders(headers)
	x := r.begin()
	r.exec(e.insert, "a1", "order.placed", 1)
	r.settled(e, 1)
	h := r.stored()[0].Header
	for _, name := range []string{"Outbox-a%20b", "Outbox-c%3Ad", "Outbox-%C3%BC", "Outbox-e%0D%0AX-Injected%3A%20yes"} {
		if h.Get(name) != "v" {
			t.Errorf("no header %s: %v", name, h)
		}
	}
	x.halt()
}

// TestArchiveOfSomeRows: rows that do not fit are not archived, and none is missed.
func TestArchiveOfSomeRows(t *testing.T) {
	t.Parallel()
	r := verified(t)
	r.cfg.Outboxes[0].Where = "event_type <> 'audit'"
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, processed_at) SELECT 'order', 1, 'audit', '{"n": 1}', now() FROM generate_series(1, 10)`)
	r.archive(50)
	r.finds(r.verify(repair), nil)
	if n := r.count(`SELECT count(*) FROM outbox_messages WHERE event_type = 'audit' AND processed_at IS NOT NULL`); n != 10 {
		t.Errorf("%d rows of others are as they were, want 10", n)
	}
}
