package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// inserted is a table of another layout, how the relay is told of it, and what its events look like.
type inserted struct {
	create  string
	env     []string
	columns map[string]string // of the layout; none is debezium
	event   outbox.Message
	headers map[string]string // of its message
	// own is walpost's table, which draws the ids; else it is "events", and create makes it.
	own *outbox.Inserter
}

const traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"

var insertedTables = map[string]inserted{
	"append": {
		own: &outbox.Inserter{Table: outbox.AppendTable, Layout: outbox.Append(), HeadersColumn: "headers"},
		env: []string{"WALPOST_LAYOUT=append"},
		event: outbox.Message{
			TenantID: 7, AggregateType: "order", AggregateID: "A-42", AggregateVersion: 3,
			OccurredAt: time.Date(2026, 11, 20, 10, 17, 35, 43e6, time.FixedZone("", 3600)), TraceID: traceparent,
			Headers: map[string]string{"x-tenant": "acme"},
		},
		headers: map[string]string{
			"ce-tenantid": "7", "ce-subject": "order/A-42", "ce-aggregateversion": "3", "traceparent": traceparent, "Outbox-x-tenant": "acme",
		},
	},
	"text": {
		create: `CREATE TABLE events (id TEXT PRIMARY KEY, "aggregateId" TEXT NOT NULL, "aggregateType" TEXT NOT NULL,
			"eventType" TEXT NOT NULL, payload JSONB NOT NULL, version BIGINT, tenant TEXT, trace TEXT,
			"publishedAt" TIMESTAMP(3), "createdAt" TIMESTAMP(3) NOT NULL DEFAULT CURRENT_TIMESTAMP)`,
		columns: map[string]string{
			"id": "id", "aggregate_type": "aggregateType", "aggregate_id": "aggregateId", "event_type": "eventType", "payload": "payload",
			"aggregate_version": "version", "tenant_id": "tenant", "trace_id": "trace", "processed_at": "publishedAt", "occurred_at": "createdAt",
		},
		env: []string{"WALPOST_MARK=update"},
		event: outbox.Message{
			TenantID: "acme", AggregateType: "order", AggregateID: "A-42", AggregateVersion: 3,
			OccurredAt: time.Date(2026, 11, 20, 10, 17, 35, 43e6, time.FixedZone("", 3600)), TraceID: traceparent,
		},
		headers: map[string]string{
			"ce-tenantid": "acme", "ce-subject": "order/A-42", "ce-aggregateversion": "3", "traceparent": traceparent,
		},
	},
	"uuid": {
		create: `CREATE TABLE events (id UUID PRIMARY KEY, aggregatetype VARCHAR(255) NOT NULL, aggregateid VARCHAR(255) NOT NULL,
			type VARCHAR(255) NOT NULL, payload JSONB NOT NULL)`,
		env:     []string{"WALPOST_LAYOUT=debezium", "WALPOST_MARK=delete"},
		event:   outbox.Message{AggregateType: "order", AggregateID: "ab000000-0000-0000-0000-000000000042"},
		headers: map[string]string{"ce-subject": "order/ab000000-0000-0000-0000-000000000042"},
	},
}

// TestRelayReadsInserted: what an Inserter writes into a table of another layout becomes the messages that it should,
// from pgx and from database/sql, one by one and in one statement.
func TestRelayReadsInserted(t *testing.T) {
	for name, table := range insertedTables {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
			r.exec(table.create)
			into := outbox.Inserter{Table: "events", Layout: table.layout(t)}
			r.env = append(table.env, "WALPOST_TABLE=public.events")
			if table.own != nil {
				into, r.env = *table.own, table.env
			}
			if len(table.columns) > 0 {
				var pairs []string
				for field, column := range table.columns {
					pairs = append(pairs, field+"="+column)
				}
				r.env = append(r.env, "WALPOST_LAYOUT="+strings.Join(pairs, ","))
			}
			if out, err := r.command("migrate", "up").CombinedOutput(); err != nil {
				t.Fatalf("walpost migrate up: %v\n%s", err, out)
			}
			relay := r.start()
			r.awaitStreaming()
			r.awaitMessages(into.Table, table, r.insert(into, table.event))
			relay.stop()
		})
	}
}

func (i *inserted) layout(t *testing.T) outbox.Layout {
	if len(i.columns) == 0 {
		return outbox.Debezium()
	}
	l, err := outbox.CustomLayout(i.columns)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// insert writes five events and returns their ids: two single ones, and three at once.
func (r *rig) insert(into outbox.Inserter, m outbox.Message) (ids []string) {
	r.t.Helper()
	event := func(n int) outbox.Message {
		m := m
		if into.Table != outbox.AppendTable {
			m.ID = fmt.Sprintf("00000000-0000-0000-0000-00000000000%d", n)
		}
		m.EventType, m.Payload = "order.placed", json.RawMessage(fmt.Sprintf(`{"n": %d}`, n))
		return m
	}
	conn := r.connect()
	defer conn.Close(context.Background())
	r.must(pgx.BeginFunc(r.t.Context(), conn, func(tx pgx.Tx) error {
		id, err := into.Insert(r.t.Context(), tx, event(0))
		ids = append(ids, id)
		return err
	}))
	cfg, err := pgx.ParseConfig(r.url)
	r.must(err)
	db := stdlib.OpenDB(*cfg)
	defer db.Close()
	tx, err := db.BeginTx(r.t.Context(), nil)
	r.must(err)
	id, err := into.Insert(r.t.Context(), tx, event(1))
	r.must(err)
	many, err := into.InsertMany(r.t.Context(), tx, []outbox.Message{event(2), event(3), event(4)})
	r.must(err)
	r.must(tx.Commit())
	return append(append(ids, id), many...)
}

func (r *rig) awaitMessages(name string, table inserted, ids []string) {
	r.t.Helper()
	stream, err := r.js.Stream(r.t.Context(), streamName)
	r.must(err)
	if ok, state := r.eventually(func(*pgx.Conn) (bool, string, error) {
		info, err := stream.Info(r.t.Context())
		if err != nil {
			return false, "", err
		}
		return info.State.Msgs == uint64(len(ids)), fmt.Sprintf("%d messages", info.State.Msgs), nil
	}); !ok {
		r.t.Fatalf("%s, want %d", state, len(ids))
	}
	for n, id := range ids {
		m, err := stream.GetMsg(r.t.Context(), uint64(n+1))
		r.must(err)
		if got, want := string(m.Data), fmt.Sprintf(`{"n": %d}`, n); got != want || m.Subject != "events.order.placed" {
			r.t.Errorf("message %d on %s: %s, want %s", n+1, m.Subject, got, want)
		}
		if got := m.Header.Get("ce-id"); !strings.HasPrefix(got, "public."+name+"/"+id+"/") {
			r.t.Errorf("message %d: ce-id %q, want row %s", n+1, got, id)
		}
		for name, want := range table.headers {
			if got := m.Header.Get(name); got != want {
				r.t.Errorf("message %d: %s is %q, want %q", n+1, name, got, want)
			}
		}
		if at := table.event.OccurredAt; !at.IsZero() && m.Header.Get("ce-time") != at.UTC().Format(time.RFC3339Nano) {
			r.t.Errorf("message %d: ce-time is %q, want %s", n+1, m.Header.Get("ce-time"), at.UTC())
		}
	}
}
