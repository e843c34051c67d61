package relay_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/e2e/sdk"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/relay"
)

// existing is an outbox table that people have.
type existing struct {
	name   string // with its schema
	create string
	// insert adds a row of aggregate $1 and event type $2 whose payload has n = $3.
	insert string
	layout func(*testing.T) outbox.Layout
	mark   outbox.Mark
	// done, failed and dead are conditions on rows in these states; "" where no column tells.
	done, failed, dead string
	headers            map[string]string // of the message with n = 1
}

// existingTables are those of other relays, as their own migrations make them, and one of a status by name.
var existingTables = map[string]existing{
	"append": {
		name: "public.outbox_events",
		insert: `INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload, headers)
			VALUES ('order', $1::text, $2, jsonb_build_object('n', $3::int), '{"x-tenant": "acme"}')`,
		layout: func(*testing.T) outbox.Layout { return outbox.Append().Journaled() }, mark: outbox.MarkJournal,
		done:    inJournal("stored"),
		failed:  "EXISTS (SELECT FROM outbox_deferred d WHERE d.id = outbox_events.id AND d.attempts > 0 AND d.last_error LIKE 'uncovered%')",
		dead:    inJournal("dead"),
		headers: map[string]string{"Outbox-x-tenant": "acme", "ce-type": "order.placed", "ce-id": "public.outbox_events/1"},
	},
	"eventferry": {
		name: "public.outbox",
		create: `CREATE TABLE outbox (id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, message_id TEXT NOT NULL, topic TEXT NOT NULL,
			aggregate_type TEXT NOT NULL, aggregate_id TEXT NOT NULL, partition_key TEXT, payload JSONB NOT NULL,
			headers JSONB NOT NULL DEFAULT '{}', trace_id TEXT, status SMALLINT NOT NULL DEFAULT 0, attempts INT NOT NULL DEFAULT 0,
			claimed_at TIMESTAMPTZ, next_retry_at TIMESTAMPTZ, created_at TIMESTAMPTZ NOT NULL DEFAULT now(), processed_at TIMESTAMPTZ);
			CREATE INDEX ON outbox (aggregate_id, id) WHERE status IN (0, 3)`,
		insert: `INSERT INTO outbox (message_id, aggregate_type, aggregate_id, topic, payload, headers)
			VALUES (concat('m-', $3::int), 'order', $1::text, $2, jsonb_build_object('n', $3::int), '{"x-tenant": "acme: 1", "odd key": {"a": [1.50, null]}, "none": null}')`,
		layout: preset("eventferry"), mark: outbox.MarkUpdate,
		done: "status = 2 AND processed_at IS NOT NULL", failed: "status = 3", dead: "status = 4 AND processed_at IS NULL",
		headers: map[string]string{
			"Outbox-message_id": "m-1", "Outbox-x-tenant": "acme:%201", "Outbox-odd%20key": "{%22a%22:[1.50,null]}",
			"Outbox-none": "", "Outbox-partition_key": "", "ce-type": "order.placed", "ce-aggregateid": "a1",
		},
	},
	"prisma": {
		name: "public.OutboxEvent",
		create: `CREATE TABLE "OutboxEvent" (id TEXT PRIMARY KEY, "aggregateId" TEXT NOT NULL, "aggregateType" TEXT NOT NULL, "eventType" TEXT NOT NULL,
			payload JSONB NOT NULL, "publishedAt" TIMESTAMP(3), attempts INTEGER NOT NULL DEFAULT 0, "lastError" TEXT,
			"createdAt" TIMESTAMP(3) NOT NULL DEFAULT CURRENT_TIMESTAMP); CREATE INDEX ON "OutboxEvent" ("publishedAt", attempts)`,
		insert: `INSERT INTO "OutboxEvent" (id, "aggregateType", "aggregateId", "eventType", payload, "createdAt")
			VALUES (gen_random_uuid()::text, 'order', $1::text, $2, jsonb_build_object('n', $3::int), date_trunc('second', LOCALTIMESTAMP) + $3::int * interval '1 ms')`,
		layout: preset("prisma"), mark: outbox.MarkUpdate,
		done: `"publishedAt" IS NOT NULL`, failed: `"publishedAt" IS NULL AND attempts > 0 AND "lastError" LIKE 'retry after %Z: uncovered%'`,
		headers: map[string]string{"ce-type": "order.placed", "ce-subject": "order/a1"},
	},
	"debezium": {
		name: "app.outbox",
		create: `CREATE SCHEMA app; CREATE TABLE app.outbox (id UUID PRIMARY KEY, aggregatetype VARCHAR(255) NOT NULL,
			aggregateid VARCHAR(255) NOT NULL, type VARCHAR(255) NOT NULL, payload JSONB NOT NULL, tenant VARCHAR(20))`,
		insert: `INSERT INTO app.outbox VALUES (('00000000-0000-0000-0000-' || lpad($3::int::text, 12, '0'))::uuid, 'order', $1::text, $2, jsonb_build_object('n', $3::int), 'acme')`,
		layout: func(t *testing.T) outbox.Layout {
			l := preset("debezium")(t)
			l.SetHeaders([]outbox.Header{{Column: "tenant", Name: "X-Tenant"}})
			return l
		},
		mark:    outbox.MarkDelete,
		headers: map[string]string{"X-Tenant": "acme", "ce-id": "app.outbox/00000000-0000-0000-0000-000000000001"},
	},
	"status": {
		name: "public.messages",
		create: `CREATE TYPE state AS ENUM ('new', 'sent', 'failed', 'dead'); CREATE TABLE messages (key TEXT PRIMARY KEY, kind TEXT NOT NULL, about TEXT,
			body JSON, state state NOT NULL DEFAULT 'new', tries SMALLINT, why TEXT, sent TIMESTAMPTZ, at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp())`,
		insert: `INSERT INTO messages (key, about, kind, body) VALUES (md5($3::int::text), $1::text, $2, json_build_object('n', $3::int))`,
		layout: func(t *testing.T) outbox.Layout {
			l, err := outbox.CustomLayout(map[string]string{
				"id": "key", "event_type": "kind", "aggregate_id": "about", "payload": "body", "attempts": "tries", "last_error": "why",
				"processed_at": "sent", "occurred_at": "at",
			})
			if err != nil {
				t.Fatal(err)
			}
			l.Columns[outbox.Status] = "state"
			l.States = [outbox.NumStates]string{outbox.Done: "sent", outbox.Failed: "failed", outbox.Dead: "dead"}
			return l
		},
		mark: outbox.MarkUpdate,
		done: "state = 'sent' AND sent IS NOT NULL", failed: "state = 'failed' AND why LIKE 'retry after %Z: uncovered%'", dead: "state = 'dead' AND tries = 3",
		headers: map[string]string{"ce-type": "order.placed"},
	},
}

// inJournal is the condition that an entry of a kind has the row.
func inJournal(kind string) string {
	return fmt.Sprintf("EXISTS (SELECT FROM outbox_journal j WHERE j.kind = '%s' AND j.ids @> outbox_events.id)", kind)
}

func preset(name string) func(*testing.T) outbox.Layout {
	return func(t *testing.T) outbox.Layout {
		l, ok := outbox.LayoutNamed(name)
		if !ok {
			t.Fatalf("no layout %s", name)
		}
		return l
	}
}

// existingRig is a rig whose outbox is such a table. Its stream takes the events of orders only.
func existingRig(t *testing.T, e existing, mode relay.Mode) *rig {
	t.Helper()
	r := newRig(t, testenv.SharedPostgres(t))
	schema, name, err := outbox.ParseTable(e.name)
	r.must(err)
	r.cfg.Outboxes = []*outbox.Table{{Schema: schema, Name: name, Layout: e.layout(t), Mark: e.mark}}
	if r.exec(e.create); e.create == "" {
		r.migrate(r.cfg.Outboxes...)
	}
	r.cfg.Own.Schema = "public"
	r.cfg.Publication = "existing"
	r.cfg.Mode, r.cfg.FallbackInterval = mode, 200*time.Millisecond
	r.createStream(func(c *natsjs.StreamConfig) {
		c.Subjects, c.Duplicates = []string{"events.order.>"}, 100*time.Millisecond
	})
	return r
}

func (r *rig) begin() *running {
	r.t.Helper()
	x := r.start()
	if r.cfg.Mode == relay.ModePoll {
		eventually(r.t, "the relay polls", func() bool { return x.Status().State == "polling" })
		return x
	}
	return x.streaming()
}

// left counts the rows of the outbox that fit a condition.
func (r *rig) left(where string) int {
	r.t.Helper()
	return r.count(fmt.Sprintf("SELECT count(*) FROM %s WHERE %s", r.cfg.Outboxes[0].SQL(), where))
}

// TestExistingTables: rows of tables that people have are delivered once and in the order of their
// aggregates; one that cannot be sent waits as far as the columns allow it, holds the later ones of its
// aggregate, becomes a dead letter, and is delivered when it is tried again.
func TestExistingTables(t *testing.T) {
	t.Parallel()
	for name, e := range existingTables {
		for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
			t.Run(fmt.Sprintf("%s/%s", name, mode), func(t *testing.T) {
				t.Parallel()
				testExisting(t, e, mode)
			})
		}
	}
}

func testExisting(t *testing.T, e existing, mode relay.Mode) {
	r := existingRig(t, e, mode)
	box := r.cfg.Outboxes[0]
	r.cfg.Retry = table.Retry{Backoff: 50 * time.Millisecond, MaxAttempts: 3}
	if r.cfg.Format = publish.FormatBinary; mode == relay.ModePoll {
		r.cfg.Format = publish.FormatCloudEvents
	}
	put := func(aggregate, kind string, n int) { r.t.Helper(); r.exec(e.insert, aggregate, kind, n) }
	x := r.begin()
	for n := 1; n <= 40; n++ {
		kind := "order.placed"
		if n == 11 {
			kind = "payment.made" // of a1
		}
		put(fmt.Sprintf("a%d", n%2), kind, n)
		if n == 20 && e.failed != "" {
			eventually(t, "a failure is recorded", func() bool {
				return r.left(e.failed) > 0 || r.count(`SELECT count(*) FROM outbox_messages_dlq`) > 0
			})
		}
	}
	eventually(t, "the row is a dead letter", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 1 })
	eventually(t, "the others are stored", func() bool { return r.storedCount() == 39 })
	if e.dead != "" && r.left(e.dead) != 1 {
		t.Errorf("%d rows are dead, want one: %s", r.left(e.dead), e.dead)
	}
	r.settled(e, 39)
	r.sentInOrder(e, 11)

	r.listenToAll()
	x.halt()
	x = r.begin()
	r.retryAll()
	eventually(t, "the dead letter's event is stored", func() bool { return r.storedCount() == 40 })
	r.settled(e, 40)
	if n := r.count(`SELECT count(*) FROM outbox_messages_dlq`); n != 0 {
		t.Errorf("%d dead letters are left", n)
	}
	if table.MarkOf(box).Stays() && mode == relay.ModeStream {
		x.halt()
		r.loseMessages(38, 39)
		x = r.begin()
		x.alarmed("events_lost")
		eventually(t, "what was lost is stored again", func() bool { return r.storedCount() == 40 })
		r.settled(e, 40)
		originals := r.stored()
		r.wantReplayed(r.request(table.ReplayChoice{}), "done 40 0")
		r.sameAsOriginals(r.stored()[40:], originals)
	}
	x.halt()
	r.finds(r.verify(), nil)
}

// TestWhere: rows that do not fit the condition are not events, however the rows are read; what was one is
// none any more when it is changed before it is sent.
func TestWhere(t *testing.T) {
	t.Parallel()
	e := existingTables["eventferry"]
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := existingRig(t, e, mode)
			r.cfg.Outboxes[0].Where = "partition_key IS DISTINCT FROM 'other' AND status <> 9"
			x := r.begin()
			for n := 1; n <= 20; n++ {
				r.exec(e.insert, "a1", "order.placed", n)
				r.exec(otherSQL, n)
			}
			r.exec(e.insert, "a1", "order.placed", 21) // the last row that any pass looks at
			r.settled(e, 21)
			if n := r.storedCount(); n != 21 || r.left("status <> 2") != 40 {
				t.Errorf("%d messages are stored and %d rows left, want 21 and 40", n, r.left("status <> 2"))
			}
			x.halt()
			report := r.verify()
			r.finds(report, nil)
			if report.Pending != 0 {
				t.Errorf("%d rows are pending", report.Pending)
			}
		})
	}
}

// otherSQL inserts two rows that do not fit.
const otherSQL = `INSERT INTO outbox (message_id, aggregate_type, aggregate_id, topic, payload, partition_key, status)
	SELECT concat('o-', $1::int), 'order', 'a1', 'order.placed', '{}', other, status FROM (VALUES ('other', 0), ('mine', 9)) o(other, status)`

// insertedSQL inserts rows that are delivered or dead.
var insertedSQL = map[string]string{
	"eventferry": `INSERT INTO outbox (message_id, aggregate_type, aggregate_id, topic, payload, status, processed_at)
		VALUES ('x', 'order', 'a1', 'order.placed', '{}', 2, now()), ('y', 'order', 'a1', 'order.placed', '{}', 2, NULL), ('z', 'order', 'a1', 'order.placed', '{}', 4, NULL)`,
	"prisma": `INSERT INTO "OutboxEvent" (id, "aggregateType", "aggregateId", "eventType", payload, "publishedAt")
		VALUES (gen_random_uuid()::text, 'order', 'a1', 'order.placed', '{}', now())`,
	"status": `INSERT INTO messages (key, about, kind, body, state, sent) VALUES (gen_random_uuid()::text, 'a1', 'order.placed', '{}', 'sent', now()),
		(gen_random_uuid()::text, 'a1', 'order.placed', '{}', 'dead', NULL)`,
}

// TestInsertedAsDone: rows that are inserted as delivered or dead are no events, and a relay that reads the
// WAL takes none for lost.
func TestInsertedAsDone(t *testing.T) {
	t.Parallel()
	for name, insert := range insertedSQL {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := existingTables[name]
			r := existingRig(t, e, relay.ModeStream)
			x := r.begin()
			put := func(from, to int) {
				for n := from; n <= to; n++ {
					r.exec(e.insert, "a1", "order.placed", n)
					r.exec(insert)
				}
			}
			put(1, 10)
			eventually(t, "the events are stored", func() bool { return r.storedCount() >= 10 })
			r.passes(r.here())
			x.halt()
			r.exec(insert)
			x = r.begin()
			put(11, 12)
			eventually(t, "the later events are stored", func() bool { return r.storedCount() >= 12 })
			r.passes(r.here())
			x.quiet("events_lost")
			x.halt()
			if n := r.storedCount(); n != 12 {
				t.Errorf("%d messages are stored, want 12", n)
			}
			r.finds(r.verify(), nil)
		})
	}
}

// settled waits until so many rows are delivered, as their columns say.
func (r *rig) settled(e existing, rows int) {
	r.t.Helper()
	if e.done == "" {
		eventually(r.t, "the rows are gone", func() bool { return r.left("true") == 0 })
		return
	}
	eventually(r.t, fmt.Sprintf("%d rows are marked", rows), func() bool { return r.left(e.done) == rows })
}

// sentInOrder wants every event but one in the stream, once, and those of an aggregate in their order.
func (r *rig) sentInOrder(e existing, but int) {
	r.t.Helper()
	last := map[string]int{}
	seen := map[int]bool{}
	messages := r.stored()
	for i, event := range sdk.Read(r.t, messages) {
		m := messages[i]
		var body struct{ N int }
		r.must(json.Unmarshal(event.Data, &body))
		aggregate := fmt.Sprint(body.N % 2)
		if seen[body.N] || body.N == but || body.N <= last[aggregate] {
			r.t.Errorf("event %d is at sequence %d, behind %d", body.N, m.Sequence, last[aggregate])
		}
		seen[body.N], last[aggregate] = true, body.N
		if body.N == 1 {
			r.hasHeaders(m.Header, e.headers)
		}
	}
	if len(seen) != 39 {
		r.t.Errorf("stored %v", slices.Sorted(maps.Keys(seen)))
	}
}

func (r *rig) hasHeaders(h nats.Header, want map[string]string) {
	r.t.Helper()
	for name, value := range want {
		if strings.HasPrefix(name, "ce-") && r.cfg.Format == publish.FormatCloudEvents {
			continue
		}
		if got := h.Get(name); name == "ce-id" && strings.HasPrefix(got, value) {
			continue
		} else if got != value {
			r.t.Errorf("header %s is %q, want %q: %v", name, got, value, h)
		}
	}
}
