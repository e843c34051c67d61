package outbox_test

import (
	"context"
	"database/sql/driver"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/catalog"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// uuid is as the usual types for UUIDs are.
type uuid [16]byte

func (u uuid) String() string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// orderNumber is an id that is shown otherwise than it is stored.
type orderNumber int32

func (orderNumber) String() string { return "No. 5" }

// noID is a value of database/sql that is NULL.
type noID struct{}

func (noID) Value() (driver.Value, error) { return nil, nil }

const mappedTables = `
	CREATE TABLE debezium (id UUID PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype VARCHAR(255) NOT NULL,
		aggregateid VARCHAR(255) NOT NULL, type VARCHAR(255) NOT NULL, payload JSONB NOT NULL);
	CREATE TABLE prisma (id TEXT PRIMARY KEY, "aggregateId" TEXT NOT NULL, "aggregateType" TEXT NOT NULL, "eventType" TEXT NOT NULL,
		payload JSON NOT NULL, version BIGINT, "publishedAt" TIMESTAMP(3), attempts INTEGER NOT NULL DEFAULT 0, "lastError" TEXT,
		"createdAt" TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP, headers JSONB, tenant UUID);
	CREATE TYPE kind AS ENUM ('order.placed');
	CREATE TABLE odd (id BIGINT GENERATED ALWAYS AS IDENTITY, kind kind, body BYTEA)`

func mappedDB(t *testing.T) (string, *pgx.Conn) {
	t.Helper()
	url := testenv.SharedPostgres(t).NewDB(t)
	conn := connect(t, url, pgx.QueryExecModeCacheStatement)
	_, err := conn.Exec(t.Context(), mappedTables)
	check(t, err)
	return url, conn
}

func prismaLayout(t *testing.T) outbox.Layout {
	t.Helper()
	l, err := outbox.CustomLayout(map[string]string{
		"id": "id", "aggregate_type": "aggregateType", "aggregate_id": "aggregateId", "event_type": "eventType", "payload": "payload",
		"aggregate_version": "version", "processed_at": "publishedAt", "attempts": "attempts", "last_error": "lastError",
		"occurred_at": "createdAt", "tenant_id": "tenant",
	})
	check(t, err)
	return l
}

// transactions are those of every driver and mode, each on a connection of its own.
func transactions(t *testing.T, url string) map[string]any {
	t.Helper()
	all := map[string]any{"database/sql": openSQL(t, url)}
	for name, mode := range map[string]pgx.QueryExecMode{
		"cache statement": pgx.QueryExecModeCacheStatement, "cache describe": pgx.QueryExecModeCacheDescribe,
		"describe": pgx.QueryExecModeDescribeExec, "exec": pgx.QueryExecModeExec, "simple": pgx.QueryExecModeSimpleProtocol,
	} {
		all["pgx "+name] = connect(t, url, mode)
	}
	return all
}

// A layout's columns take their values as they are, whatever the columns' types and the driver.
func TestInserterLayouts(t *testing.T) {
	url, conn := mappedDB(t)
	debezium := outbox.Inserter{Table: "debezium", Layout: outbox.Debezium()}
	prisma := outbox.Inserter{Table: "public.prisma", Layout: prismaLayout(t), HeadersColumn: "headers"}
	u := uuid{0: 0xab, 15: 1}
	n := 0
	for name, tx := range transactions(t, url) {
		n++
		id, err := debezium.Insert(t.Context(), tx, outbox.Message{
			AggregateType: "order", AggregateID: u, EventType: "order.placed", Payload: json.RawMessage(`{"a": "\\ \" é"}`),
		})
		check(t, err)
		var got string
		check(t, conn.QueryRow(t.Context(), `SELECT concat_ws('|', aggregatetype, aggregateid, type, payload) FROM debezium WHERE id = $1::text::uuid`, id).Scan(&got))
		if want := `order|ab000000-0000-0000-0000-000000000001|order.placed|{"a": "\\ \" é"}`; got != want {
			t.Errorf("%s: debezium\n got %s\nwant %s", name, got, want)
		}
		key := fmt.Sprintf("key %d's", n)
		id, err = prisma.Insert(t.Context(), tx, outbox.Message{
			ID: key, TenantID: u, AggregateType: "order", AggregateID: orderNumber(-7), AggregateVersion: 12, EventType: "order.placed",
			Payload: json.RawMessage(`{"b":1.10,"a":"\\"}`), Headers: map[string]string{"x-tenant": `"\ é`},
			OccurredAt: time.Date(2026, 11, 20, 10, 17, 35, 43443999, time.FixedZone("", 5*3600+45*60)),
		})
		check(t, err)
		check(t, conn.QueryRow(t.Context(), `SELECT concat_ws('|', "aggregateType", "aggregateId", "eventType", version, payload, headers, "createdAt",
			tenant, attempts) FROM prisma WHERE id = $1 AND "publishedAt" IS NULL AND "lastError" IS NULL`, id).Scan(&got))
		want := `order|-7|order.placed|12|{"b":1.10,"a":"\\"}|{"x-tenant": "\"\\ é"}|2026-11-20 04:32:35.043443|ab000000-0000-0000-0000-000000000001|0`
		if got != want || id != key {
			t.Errorf("%s: prisma %q\n got %s\nwant %s", name, id, got, want)
		}
	}
}

// The ids are those of the events, in the events' order, also where some are given and some are made.
func TestInsertMany(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		conn := connect(t, url, pgx.QueryExecModeCacheStatement)
		_, err := conn.Exec(t.Context(), mappedTables+`;
			CREATE TABLE parts (id UUID DEFAULT gen_random_uuid(), aggregatetype TEXT, aggregateid INT, type TEXT, payload JSONB)
				PARTITION BY HASH (aggregateid);
			CREATE TABLE parts0 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 0);
			CREATE TABLE parts1 PARTITION OF parts FOR VALUES WITH (MODULUS 2, REMAINDER 1)`)
		check(t, err)
		for name, tx := range transactions(t, url) {
			for _, table := range []string{"debezium", "parts"} {
				into := outbox.Inserter{Table: table, Layout: outbox.Debezium()}
				var messages []outbox.Message
				for n := range 300 {
					m := outbox.Message{AggregateType: name, AggregateID: n, EventType: "order.placed", Payload: json.RawMessage("{}")}
					if n%3 == 0 {
						m.ID = uuid{byte(len(name)), byte(name[4]), byte(n >> 8), byte(n), byte(len(table)), byte(name[len(name)-1])}
					}
					messages = append(messages, m)
				}
				ids, err := into.InsertMany(t.Context(), tx, messages)
				check(t, err)
				var stored []string
				check(t, conn.QueryRow(t.Context(), `SELECT array_agg(id::text ORDER BY aggregateid::int) FROM `+table+` WHERE aggregatetype = $1`, name).Scan(&stored))
				if !slices.Equal(ids, stored) {
					t.Errorf("%s, %s: the ids are not those of the events", name, table)
				}
				for n, m := range messages {
					if m.ID != nil && ids[n] != m.ID.(uuid).String() {
						t.Fatalf("%s: id %d is %s, want %s", name, n, ids[n], m.ID)
					}
				}
			}
		}
	})
}

func TestInsertManyCanonical(t *testing.T) {
	_, conn := outboxDB(t)
	delayed := full
	delayed.AvailableAt = time.Time{}
	delayed.EventVersion, delayed.TraceID = 0, ""
	ids, err := outbox.InsertMany(t.Context(), conn, []outbox.Message{full, delayed, full})
	check(t, err)
	if len(ids) != 3 || ids[0] >= ids[1] || ids[1] >= ids[2] {
		t.Fatalf("ids %v", ids)
	}
	if got := rowText(t, conn, ids[2]); got != fullText {
		t.Errorf("row\n got %s\nwant %s", got, fullText)
	}
	if got := rowText(t, conn, ids[1]); !strings.Contains(got, "|order.created|1|") || !strings.HasSuffix(got, "|NULL") {
		t.Errorf("defaults are not the column's: %s", got)
	}
	if ids, err := outbox.InsertMany(t.Context(), nil, nil); ids != nil || err != nil {
		t.Errorf("no events: %v, %v", ids, err)
	}
	// All or nothing, and the number of the one that is wrong.
	bad := full
	bad.Payload = json.RawMessage(`{`)
	if _, err := outbox.InsertMany(t.Context(), conn, []outbox.Message{full, bad}); err == nil || !strings.Contains(err.Error(), "number 2: invalid Payload") {
		t.Errorf("error %v", err)
	}
	bad.Payload = json.RawMessage(`"\u0000"`)
	if _, err := outbox.InsertMany(t.Context(), conn, []outbox.Message{full, bad}); err == nil || !strings.Contains(err.Error(), "22P05") {
		t.Errorf("error %v, want the server's", err)
	}
	var n int
	check(t, conn.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages`).Scan(&n))
	if n != 3 {
		t.Errorf("%d rows, want 3", n)
	}
	many := slices.Repeat([]outbox.Message{full}, 7282)
	if _, err := outbox.InsertMany(t.Context(), conn, many); err == nil || !strings.Contains(err.Error(), "they have 65538 values") {
		t.Errorf("error %v, want the limit", err)
	}
	ids, err = outbox.InsertMany(t.Context(), conn, many[:7281])
	check(t, err)
	if len(ids) != 7281 || !slices.IsSorted(ids) {
		t.Errorf("%d ids", len(ids))
	}
}

// What has no column is named with the layout and the remedy, and nothing is sent.
func TestInserterHasNoColumn(t *testing.T) {
	debezium := outbox.Inserter{Table: "shop.events", Layout: outbox.Debezium()}
	canonical := outbox.Inserter{}
	for _, c := range []struct {
		into   *outbox.Inserter
		set    func(*outbox.Message)
		want   string
		remedy string
	}{
		{&canonical, func(m *outbox.Message) { m.AggregateVersion = 1 }, `AggregateVersion in layout "canonical" of public.outbox_messages`, "map aggregate_version"},
		{&canonical, func(m *outbox.Message) { m.Headers = map[string]string{"a": "b"} }, `Headers in layout "canonical"`, "name a jsonb column in Inserter.HeadersColumn"},
		{&debezium, func(m *outbox.Message) { m.TenantID = 0 }, `TenantID in layout "debezium" of shop.events`, "map tenant_id"},
		{&debezium, func(m *outbox.Message) { m.EventVersion = 1 }, "EventVersion", "map event_version"},
		{&debezium, func(m *outbox.Message) { m.OccurredAt = time.Now() }, "OccurredAt", "map occurred_at"},
		{&debezium, func(m *outbox.Message) { m.AvailableAt = time.Now() }, "AvailableAt", "map available_at"},
		{&debezium, func(m *outbox.Message) { m.TraceID = "t" }, "TraceID", "map trace_id"},
	} {
		m := outbox.Message{AggregateType: "a", AggregateID: 1, EventType: "a.b", Payload: json.RawMessage("1")}
		c.set(&m)
		_, err := c.into.Insert(t.Context(), nil, m)
		if err == nil || !strings.Contains(err.Error(), "no column for "+c.want) || !strings.Contains(err.Error(), c.remedy) {
			t.Errorf("error %v, want %q and %q", err, c.want, c.remedy)
		}
	}
}

func TestInserterRefuses(t *testing.T) {
	var into outbox.Inserter
	for want, set := range map[string]func(*outbox.Message){
		"invalid AggregateID: float64":      func(m *outbox.Message) { m.AggregateID = 1.5 },
		"invalid TenantID: a nil *int":      func(m *outbox.Message) { m.TenantID = (*int)(nil) },
		"invalid ID: it is empty":           func(m *outbox.Message) { m.ID = "" },
		"invalid AggregateID: it is empty":  func(m *outbox.Message) { m.AggregateID = "" },
		"invalid EventType: it has a zero":  func(m *outbox.Message) { m.EventType = "a\x00" },
		"invalid TraceID: it has a zero":    func(m *outbox.Message) { m.TraceID = "\xff" },
		"negative AggregateVersion -1":      func(m *outbox.Message) { m.AggregateVersion = -1 },
		`invalid header name "nAts-Msg-Id"`: func(m *outbox.Message) { m.Headers = map[string]string{"nAts-Msg-Id": "x"} },
		`invalid header name "a:b"`:         func(m *outbox.Message) { m.Headers = map[string]string{"a:b": "x"} },
		`invalid header name ""`:            func(m *outbox.Message) { m.Headers = map[string]string{"": "x"} },
		`invalid header "a": its value`:     func(m *outbox.Message) { m.Headers = map[string]string{"a": "x\x00"} },
	} {
		m := full
		set(&m)
		if _, err := into.Insert(t.Context(), nil, m); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q", err, want)
		}
	}
	m := full
	m.Table = "other"
	if _, err := into.InsertMany(t.Context(), nil, []outbox.Message{full, m}); err == nil || !strings.Contains(err.Error(), "one table") {
		t.Errorf("two tables: %v", err)
	}
}

// JSON in a bytea would lose its backslashes: the server refuses it.
func TestInserterOddColumns(t *testing.T) {
	_, conn := mappedDB(t)
	layout, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "kind", "payload": "body"})
	check(t, err)
	into := outbox.Inserter{Table: "odd", Layout: layout}
	m := outbox.Message{EventType: "order.placed", Payload: json.RawMessage(`{"a": "\\"}`), TenantID: noID{}}
	if _, err := into.Insert(t.Context(), conn, m); err == nil || !strings.Contains(err.Error(), "is of type bytea") {
		t.Errorf("error %v, want a refused type", err)
	}
	_, err = conn.Exec(t.Context(), `ALTER TABLE odd ALTER body TYPE TEXT USING ''`)
	check(t, err)
	_, err = into.Insert(t.Context(), conn, m)
	check(t, err)
	_, err = conn.Exec(t.Context(), `CREATE FUNCTION leave_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
		CREATE TRIGGER leave_out BEFORE INSERT ON odd FOR EACH ROW EXECUTE FUNCTION leave_out()`)
	check(t, err)
	if _, err := into.Insert(t.Context(), conn, m); err == nil || !strings.Contains(err.Error(), "public.odd took 0 of 1 events") {
		t.Errorf("error %v, want a row that was left out", err)
	}
}

// An error of the server names the table and what helps, and leaves nothing behind.
func TestInserterExplains(t *testing.T) {
	_, conn := mappedDB(t)
	_, err := conn.Exec(t.Context(), `DROP ROLE IF EXISTS insert_only;
		CREATE ROLE insert_only; GRANT INSERT ON debezium TO insert_only; GRANT insert_only TO CURRENT_USER`)
	check(t, err)
	defer func() {
		_, err := conn.Exec(context.WithoutCancel(t.Context()), `RESET ROLE; DROP OWNED BY insert_only; DROP ROLE insert_only`)
		check(t, err)
	}()
	custom, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "typ", "payload": "body"})
	check(t, err)
	odd := custom
	odd.Columns[outbox.EventType] = "kind"
	bare := outbox.Message{EventType: "order.placed", Payload: json.RawMessage("{}")}
	whole := bare
	whole.ID, whole.AggregateType, whole.AggregateID = uuid{1}, "order", 1
	_, err = conn.Exec(t.Context(), `ALTER TABLE odd ALTER body TYPE TEXT USING ''`)
	check(t, err)
	for _, c := range []struct {
		name, before string
		into         outbox.Inserter
		message      outbox.Message
		want         []string
	}{
		{"no table", "", outbox.Inserter{Table: "gone"}, bare, []string{"write to public.gone: ", "42P01", "`walpost migrate up`"}},
		{"no schema", "", outbox.Inserter{Table: "gone.gone"}, bare, []string{"write to gone.gone: ", "name another one"}},
		{"no column", "", outbox.Inserter{Table: "odd", Layout: custom}, bare, []string{`"typ"`, "correct the columns of the layout"}},
		{"id given", "", outbox.Inserter{Table: "odd", Layout: odd}, func() outbox.Message { m := bare; m.ID = 7; return m }(), []string{"428C9", "leave ID unset"}},
		{"no default", "", outbox.Inserter{Table: "debezium", Layout: outbox.Debezium()}, bare, []string{`"aggregatetype"`, "set the field"}},
		{"no uuid", "", outbox.Inserter{Table: "debezium", Layout: outbox.Debezium()}, func() outbox.Message { m := whole; m.ID = "7"; return m }(), []string{"22P02", `"7"`}},
		{"no privilege", "SET LOCAL ROLE insert_only", outbox.Inserter{Table: "debezium", Layout: outbox.Debezium()}, whole, []string{"42501", `GRANT INSERT, SELECT ("id") ON "public"."debezium"`}},
		{"aborted", "SELECT 1 / 0", outbox.Inserter{Table: "debezium", Layout: outbox.Debezium()}, whole, []string{"25P02", "roll it back"}},
	} {
		tx, err := conn.Begin(t.Context())
		check(t, err)
		if _, err := tx.Exec(t.Context(), c.before); err != nil && c.name != "aborted" {
			t.Fatal(err)
		}
		_, err = c.into.InsertMany(t.Context(), tx, []outbox.Message{c.message})
		for _, want := range c.want {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: error %v, want %q", c.name, err, want)
			}
		}
		check(t, tx.Rollback(t.Context()))
	}
	// The second row is wrong: neither is written.
	wrong := whole
	wrong.ID = "7"
	into := outbox.Inserter{Table: "debezium", Layout: outbox.Debezium()}
	if _, err := into.InsertMany(t.Context(), conn, []outbox.Message{whole, wrong}); err == nil {
		t.Error("a wrong UUID is no error")
	}
	var n int
	check(t, conn.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM debezium) + (SELECT count(*) FROM odd)`).Scan(&n))
	if n != 0 {
		t.Errorf("%d rows were left behind", n)
	}
}

// The ids of a table with other ids than numbers are not made numbers.
func TestInsertWantsNumbers(t *testing.T) {
	_, conn := outboxDB(t)
	_, err := conn.Exec(t.Context(), `ALTER TABLE outbox_messages ALTER id DROP IDENTITY;
		ALTER TABLE outbox_messages ALTER id TYPE TEXT, ALTER id SET DEFAULT 'x'`)
	check(t, err)
	if _, err := outbox.Insert(t.Context(), conn, full); err == nil || !strings.Contains(err.Error(), "use an Inserter") {
		t.Errorf("error %v", err)
	}
}

type traceKey struct{}

// The trace of the context is written where the message has none of its own.
func TestInserterTraceID(t *testing.T) {
	_, conn := outboxDB(t)
	into := outbox.Inserter{TraceID: func(ctx context.Context) string { s, _ := ctx.Value(traceKey{}).(string); return s }}
	m := full
	m.TraceID = ""
	for _, c := range []struct{ ctx, message, want string }{
		{"", "", "NULL"}, {"of-context", "", "of-context"}, {"of-context", "of-message", "of-message"},
	} {
		m.TraceID = c.message
		id, err := into.Insert(context.WithValue(t.Context(), traceKey{}, c.ctx), conn, m)
		check(t, err)
		n, err := strconv.ParseInt(id, 10, 64)
		check(t, err)
		if got := rowText(t, conn, n); !strings.HasSuffix(got, "|"+c.want) {
			t.Errorf("row %s, want trace %s", got, c.want)
		}
	}
}

func TestCheckEventType(t *testing.T) {
	for _, name := range []string{"order.placed", "payment.refund_issued", "invoice.paid", "shop.order2.line_sent", "user.password_reset", "user.logged_in"} {
		if err := outbox.CheckEventType(name); err != nil {
			t.Error(err)
		}
	}
	for name, want := range map[string]string{
		"placed": "two or more parts", "": "two or more parts", "order.place": "past tense", "Order.placed": `part "Order"`,
		"order..placed": `part ""`, "order.2placed": `part "2placed"`, "order-line.placed": `part "order-line"`, "order.placed ": `part "placed "`,
		"order.": `part ""`, "orders.placed.v2": "past tense", "order.plac\u00e9d": "part", "placed.order": "past tense", "order.not_yet": `"not_yet" has no past participle`,
	} {
		if err := outbox.CheckEventType(name); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: error %v, want %q", name, err, want)
		}
	}
	into := outbox.Inserter{CheckNames: true}
	m := full
	m.EventType = "PlaceOrder"
	if _, err := into.Insert(t.Context(), nil, m); err == nil || !strings.Contains(err.Error(), "two or more parts") {
		t.Errorf("error %v", err)
	}
}

// TestCheck: what the application's check refuses is not inserted, nor are the other events of its statement.
func TestCheck(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn := connect(t, url, pgx.QueryExecModeCacheStatement)
	_, err := conn.Exec(t.Context(), `CREATE TABLE outbox_messages (id BIGINT GENERATED ALWAYS AS IDENTITY, tenant_id BIGINT, aggregate_type TEXT,
		aggregate_id BIGINT, event_type TEXT, event_version SMALLINT, payload JSONB)`)
	check(t, err)
	events, err := catalog.Load(fstest.MapFS{"a.yaml": {Data: []byte("name: order.placed\nversion: 2\nowner: o\ndescription: d\nreplay: safe\n" +
		"schema: {properties: {items: {items: {properties: {sku: {type: string}}}}}}\n")}})
	check(t, err)
	into := outbox.Inserter{Check: events.CheckMessage}
	good := outbox.Message{EventType: "order.placed", EventVersion: 2, Payload: json.RawMessage(`{"items": [{"sku": "A"}]}`)}
	misfit, unknown := good, good
	misfit.Payload = json.RawMessage(`{"items": [{"sku": "A"}, {"sku": 7}]}`)
	unknown.EventVersion = 0
	for _, tt := range []struct {
		messages []outbox.Message
		want     string
	}{
		{[]outbox.Message{misfit}, `insert event "order.placed": order.placed version 2: /items/1/sku: number instead of string`},
		{[]outbox.Message{good, misfit}, `insert 2 events: number 2: order.placed version 2: /items/1/sku: number instead of string`},
		{[]outbox.Message{unknown}, `insert event "order.placed": "order.placed" version 1: the catalogue does not have it`},
		{[]outbox.Message{good, good}, ""},
		{[]outbox.Message{good}, ""},
	} {
		if len(tt.messages) == 1 {
			_, err = into.Insert(t.Context(), conn, tt.messages[0])
		} else {
			_, err = into.InsertMany(t.Context(), conn, tt.messages)
		}
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("error %q, want %q", got, tt.want)
		}
	}
	var n int
	check(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM outbox_messages").Scan(&n))
	if n != 3 {
		t.Errorf("%d rows are inserted, want 3", n)
	}
}
