package deadletter_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// dlq opens the dead letters as the commands do.
func (b *bench) dlq(tables ...*outbox.Table) *deadletter.Queue {
	b.t.Helper()
	q, err := deadletter.Open(b.t.Context(), deadletter.Config{Config: b.config(), Outboxes: tables})
	b.must(err)
	b.t.Cleanup(q.Close)
	return q
}

// retry returns the ids of what was retried, and the errors of what was not.
func (b *bench) retry(q *deadletter.Queue, f deadletter.Filter) (done []int64, left map[int64]error) {
	b.t.Helper()
	left = map[int64]error{}
	b.must(q.Retry(b.t.Context(), f, false, func(o deadletter.Outcome) {
		if o.Err != nil {
			left[o.ID] = o.Err
			return
		}
		done = append(done, o.ID)
	}))
	return done, left
}

func (b *bench) list(q *deadletter.Queue, f deadletter.Filter) (letters []deadletter.Letter) {
	b.t.Helper()
	b.must(q.List(b.t.Context(), f, func(l deadletter.Letter) error {
		letters = append(letters, l)
		return nil
	}))
	return letters
}

// shape is an outbox table with one row of values that are easily bent.
type shape struct {
	create, insert string
	table          outbox.Table
	// letter is what the columns for reading say of the dead letter.
	letter string
}

func shapes(t *testing.T) map[string]shape {
	odd, err := outbox.CustomLayout(map[string]string{
		"id": "Id", "event_type": `kind, "of"`, "payload": `it's`, "aggregate_type": "agg(type)", "aggregate_id": "agg\\id",
		"occurred_at": "when", "tenant_id": "num", "event_version": "version", "trace_id": "blob",
	})
	if err != nil {
		t.Fatal(err)
	}
	return map[string]shape{
		"canonical": {
			create: `SELECT`,
			insert: `INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, event_version, payload, occurred_at, available_at, attempts, last_error, trace_id)
				VALUES (9223372036854775807, -9223372036854775808, 'ord"er', 42, E'a b\t(c),\\', 32767, '{"n": 0.10, "big": 1e400, "z": "\u00e9\\\"", "a": [1, null]}',
					'-infinity', '2020-01-01', 10, 'size: too large', '')`,
			table:  outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
			letter: `(9223372036854775807,-9223372036854775808,"ord""er",42,32767,t,-infinity,"2020-01-01 00:00:00+00",11,"")`,
		},
		"debezium": {
			create: `CREATE TABLE debezium (id uuid PRIMARY KEY, aggregatetype varchar(255), aggregateid varchar(255), type varchar(255), payload json,
				extra char(5), more jsonb, flags boolean[], raw json)`,
			insert: `INSERT INTO debezium VALUES ('00000000-0000-0000-0000-00000000002a', 'order', 'o-1', 'x', ' {"b" : 1e400, "a":0.10,  "b": "\u0000"}', 'ab', 'null',
				'{{t,f},{NULL,t}}', '{"zero": "\u0000", "half": "\ud800"}')`,
			table:  outbox.Table{Schema: "public", Name: "debezium", Layout: outbox.Debezium(), Mark: outbox.MarkDelete},
			letter: `(,,order,,,,,,1,)`,
		},
		"odd": {
			create: `CREATE TYPE mood AS ENUM ('so, so', 'good'); CREATE TYPE pair AS (a text, b jsonb); CREATE DOMAIN doc AS jsonb CHECK (VALUE IS DISTINCT FROM '1');
				CREATE TABLE "Odd ""one""" ("Id" bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, "gone" int, "kind, ""of""" text, "it's" jsonb, "agg(type)" mood,
				"agg\id" numeric, "when" timestamp, "num" numeric(30, 3), "version" integer, "blob" bytea, twice bigint GENERATED ALWAYS AS ("Id" * 2) STORED,
				t1 text, t2 text, t3 text, i int[], p pair, r tstzrange, f float8, n numeric, iv interval, d doc, m money, ts timestamptz[], x "char", bits bit(3), nm name, js json, em jsonb);
				ALTER TABLE "Odd ""one""" DROP COLUMN gone`,
			insert: `INSERT INTO "Odd ""one""" VALUES (DEFAULT, E'\x01"quoted", \\ and\nlines', '"a string"', 'so, so', 1.50, '0044-03-15 12:00 BC', 7.000, 99999, '\xdeadbeef00', DEFAULT,
				'', NULL, 'NULL', '[7:8]={1,2}', ROW('a"b', '{"k": "v"}'), '[-infinity, 2024-01-01)', '-0', 'NaN', '-1 year 2 days 03:04:05.6', '{"z": 1, "y": 1.0}', 12.5,
				'{infinity,NULL,10000-01-01}', '"', B'101', 'né', '"\u0000"', '{}')`,
			table:  outbox.Table{Schema: "public", Name: `Odd "one"`, Layout: odd, Mark: outbox.MarkDelete},
			letter: `(1,,"so, so",,,t,"0044-03-15 12:00:00+00 BC",,1,"\\xdeadbeef00")`,
		},
	}
}

// TestRetryPutsBackWhatWas: every value as it was, whether the table or the WAL
// had it, and so the same message.
func TestRetryPutsBackWhatWas(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		for name, s := range shapes(t) {
			t.Run(name, func(t *testing.T) { retryOne(t, newBench(t, pg, outbox.MarkUpdate), s) })
		}
	})
}

func retryOne(t *testing.T, b *bench, s shape) {
	box := &s.table
	b.exec(`SET timezone = 'UTC'`)
	b.exec(s.create)
	b.exec(s.insert)
	b.must(b.db.CheckTable(t.Context(), box))
	hash := func() string { return b.text(`SELECT ` + box.HashSQL("t") + ` FROM ` + box.SQL() + ` t`) }
	whole := func() string { return b.text(`SELECT t FROM ` + box.SQL() + ` t`) }
	hashed, before := hash(), whole()
	ev := b.event(box)
	if got := fmt.Sprint(int64(ev.Hash())); got != hashed {
		t.Fatalf("the event's hash is %s, the row's %s", got, hashed)
	}
	b.park(box, ev)
	q := b.dlq(box)
	letters := b.list(q, deadletter.Filter{})
	if len(letters) != 1 || letters[0].RowID != string(ev.Values[outbox.ID]) || *letters[0].LastError != "subject: bad" {
		t.Fatalf("dead letters: %+v", letters)
	}
	read := b.text(`SELECT ROW(id, tenant_id, aggregate_type, aggregate_id, event_version,
		payload::text = original ->> ` + literal(box.Layout.Columns[outbox.Payload]) + `, occurred_at, available_at, attempts, trace_id) FROM outbox_messages_dlq`)
	if read != s.letter {
		t.Errorf("the dead letter reads %s, want %s", read, s.letter)
	}
	done, left := b.retry(q, deadletter.Filter{})
	if len(done) != 1 || len(left) != 0 {
		t.Fatalf("retried %v, left %v", done, left)
	}
	if got := hash(); got != hashed {
		t.Errorf("the row's hash is %s, it was %s", got, hashed)
	}
	// A record has the relay's columns in it.
	if got := whole(); !box.Layout.Records() && got != before {
		t.Errorf("the row is\n%s, it was\n%s", got, before)
	}
	if n := b.text(`SELECT count(*) FROM outbox_messages_dlq`); n != "0" {
		t.Errorf("%s dead letters stay", n)
	}
	if box.Layout.Records() {
		fresh := b.text(`SELECT concat_ws('|', attempts, last_error, processed_at, now() - available_at < interval '1 minute') FROM ` + box.SQL())
		if fresh != "0|held: a dead letter that is tried again|t" {
			t.Errorf("the relay's columns say %q", fresh)
		}
	}
}

// TestRetryJournaled: a row that is still there is pending again, and held. One that is gone comes again under another id.
func TestRetryJournaled(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		rows := b.insert(3)
		for i := range rows {
			rows[i].Failure, rows[i].Polled, rows[i].Attempts = "subject: bad", true, 1
		}
		v, err := b.db.Park(t.Context(), b.table, rows, table.Retry{MaxAttempts: 1})
		b.must(err)
		b.want(v, table.Done, table.Done, table.Done)
		if got := b.text(`SELECT string_agg(concat(kind, ' ', ids), ' ') FROM outbox_journal`); got != "dead {[1,4)}" {
			t.Fatalf("journal: %s", got)
		}
		b.exec(`DELETE FROM outbox_messages WHERE id = 2`)
		q := b.dlq(b.table)
		b.must(q.Retry(t.Context(), deadletter.Filter{}, true, func(o deadletter.Outcome) { b.must(o.Err) }))
		if got := b.text(`SELECT count(*) FROM outbox_messages_dlq`); got != "3" {
			t.Errorf("%s dead letters after a dry run", got)
		}
		if done, left := b.retry(q, deadletter.Filter{}); len(done) != 3 || len(left) != 0 {
			t.Fatalf("retried %v, left %v", done, left)
		}
		for sql, want := range map[string]string{
			`SELECT string_agg(concat(id, ' ', attempts, ' ', last_error, ' ', available_at <= now(), ' ', aggregate_hash IS NOT NULL), ', ' ORDER BY id) FROM outbox_deferred`: "1 0 held: a dead letter that is tried again t t, 3 0 held: a dead letter that is tried again t t",
			`SELECT string_agg(ids::text, ' ') FROM outbox_journal`:             "{[2,3)}",
			`SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_messages`: "1 3 5", // 4 went with the dry run
			`SELECT count(*) FROM outbox_messages_dlq`:                          "0",
		} {
			if got := b.text(sql); got != want {
				t.Errorf("%s: %s, want %s", sql, got, want)
			}
		}
		n, err := b.db.PendingCount(t.Context(), b.table, 100)
		b.must(err)
		if n != 3 {
			t.Errorf("%d rows are pending, want 3", n)
		}
		b.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, original, attempts, last_error) VALUES ('public.outbox_messages', '9', '{"id": 9}', 1, 'subject: bad')`)
		done, left := b.retry(q, deadletter.Filter{})
		for _, err := range left {
			if len(done) > 0 || !strings.Contains(err.Error(), "nothing of the row but its id") || hint.Of(err) == "" {
				t.Errorf("without columns: %v (%s)", err, hint.Of(err))
			}
		}
		if len(left) != 1 {
			t.Errorf("left %v", left)
		}
	})
}

func literal(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// event reads the table's only row as the WAL renders it.
func (b *bench) event(box *outbox.Table) *outbox.Event {
	b.t.Helper()
	ev := &outbox.Event{Table: box}
	for f := outbox.ID; f < outbox.NumFields; f++ {
		if !box.Layout.Has(f) {
			continue
		}
		var v *string
		b.must(b.db.Conn().QueryRow(b.t.Context(), fmt.Sprintf(`SELECT CASE WHEN %[1]s IS NOT NULL THEN concat(%[1]s) END FROM %s`, box.Column(f), box.SQL())).Scan(&v))
		if v != nil {
			ev.Values[f] = []byte(*v)
		}
	}
	return ev
}

// park has a row made a dead letter. A layout that records failures is read as one that
// cannot.
func (b *bench) park(box *outbox.Table, ev *outbox.Event) {
	b.t.Helper()
	blunt := *box
	blunt.Layout.Columns[outbox.LastError] = ""
	v, err := b.db.Park(b.t.Context(), &blunt, []table.Row{{Ref: ev.Ref(), Failure: "subject: bad"}}, retry)
	b.must(err)
	b.want(v, table.Done)
}

// dead inserts n rows and buries them, as dead letters 1 to n.
func (b *bench) dead(n int) {
	b.t.Helper()
	rows := b.insert(n)
	for i := range rows {
		rows[i].Failure = "subject: holds a space"
	}
	blunt := *b.table
	blunt.Layout.Columns[outbox.LastError] = ""
	for some := range slices.Chunk(rows, 1000) {
		_, err := b.db.Park(b.t.Context(), &blunt, some, retry)
		b.must(err)
	}
	if got := b.text(`SELECT count(*) FROM outbox_messages_dlq`); got != fmt.Sprint(n) {
		b.t.Fatalf("%s dead letters, want %d", got, n)
	}
}

func TestFilters(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE TABLE debezium (id uuid PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload json)`)
	b.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, original, tenant_id, aggregate_type, aggregate_id, event_type, last_error, failed_at) VALUES
		('public.outbox_messages', '1', '{"id": 1, "tenant_id": 5, "aggregate_id": 42}', 5, 'order', 42, 'order.placed', 'subject: bad', now() - interval '3 days'),
		('public.outbox_messages', '2', NULL, 5, 'order', 43, 'order.paid', 'size: 9 bytes', now() - interval '1 hour'),
		('public.debezium', 'x', '{"aggregateid": "o/1"}', NULL, 'order', NULL, 'order.placed', 'sized: no class', now()),
		('public.other', 'y', '"no object"', 6, 'user', 42, NULL, NULL, now())`)
	q := b.dlq(b.table, &outbox.Table{Schema: "public", Name: "debezium", Layout: outbox.Debezium(), Mark: outbox.MarkDelete})
	for _, c := range []struct {
		f    deadletter.Filter
		want string
	}{
		{deadletter.Filter{}, "[1 2 3 4]"},
		{deadletter.Filter{Limit: 2}, "[1 2]"},
		{deadletter.Filter{IDs: []int64{4, 9, 2}}, "[2 4]"},
		{deadletter.Filter{IDs: []int64{}}, "[]"},
		{deadletter.Filter{EventType: "order.placed"}, "[1 3]"},
		{deadletter.Filter{EventType: "order.placed", Outbox: "public.debezium"}, "[3]"},
		{deadletter.Filter{AggregateType: "order"}, "[1 2 3]"},
		{deadletter.Filter{AggregateType: "order", AggregateID: "42"}, "[1]"},
		{deadletter.Filter{AggregateType: "order", AggregateID: "o/1"}, "[3]"},
		{deadletter.Filter{AggregateID: "42"}, "[1 4]"},
		{deadletter.Filter{TenantID: "5"}, "[1 2]"},
		{deadletter.Filter{TenantID: "6"}, "[4]"},
		{deadletter.Filter{Class: "size"}, "[2]"},
		{deadletter.Filter{Class: "%"}, "[]"},
		{deadletter.Filter{OlderThan: time.Minute}, "[1 2]"},
		{deadletter.Filter{NewerThan: 2 * time.Hour}, "[2 3 4]"},
		{deadletter.Filter{OlderThan: time.Minute, NewerThan: 2 * time.Hour}, "[2]"},
		{deadletter.Filter{EventType: "' OR true --"}, "[]"},
	} {
		ids := []int64{}
		for _, l := range b.list(q, c.f) {
			ids = append(ids, l.ID)
		}
		if got := fmt.Sprint(ids); got != c.want {
			t.Errorf("%+v: %s, want %s", c.f, got, c.want)
		}
		c.f.Limit = 0
		if n, err := q.Count(t.Context(), c.f, 3); err != nil || c.want != "[1 2]" && n != min(3, len(ids)) {
			t.Errorf("%+v: counted %d, %v", c.f, n, err)
		}
	}
	now, err := q.Now(t.Context(), deadletter.Filter{Outbox: "public.other"})
	b.must(err)
	b.exec(`INSERT INTO outbox_messages_dlq (outbox, row_id, last_error) VALUES ('public.other', 'z', 'late: it came after the question')`)
	b.must(q.Discard(t.Context(), now, false, func(o deadletter.Outcome) { b.must(o.Err) }))
	if left := b.text(`SELECT string_agg(row_id, ' ') FROM outbox_messages_dlq WHERE outbox = 'public.other'`); left != "z" {
		t.Errorf("%s is left, want z", left)
	}
}

// TestRetryLeavesWhatCannotGoBack, says why, and takes the others.
func TestRetryLeavesWhatCannotGoBack(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.dead(10)
	b.exec(`INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) VALUES (2, 'order', 7, 'came.again', '{}')`)
	b.exec(`UPDATE outbox_messages_dlq SET outbox = 'public.forgotten' WHERE row_id = '3'`)
	b.exec(`UPDATE outbox_messages_dlq SET outbox = 'public.gone' WHERE row_id = '4'`)
	b.exec(`ALTER TABLE outbox_messages ADD CHECK (aggregate_id <> 5), ADD fresh text DEFAULT 'default'`)
	b.exec(`UPDATE outbox_messages_dlq SET original = replace(original::text, '"trace_id"', '"trail"')::json WHERE row_id = '6'`)
	b.exec(`UPDATE outbox_messages_dlq SET original = NULL WHERE row_id = '7'`)
	b.exec(`UPDATE outbox_messages_dlq SET original = replace(original::text, '"event_version":1', '"event_version":70000')::json WHERE row_id = '8'`)
	b.exec(`CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN CASE WHEN NEW.aggregate_id <> 9 THEN NEW END; END'`)
	b.exec(`CREATE TRIGGER swallow BEFORE INSERT ON outbox_messages FOR EACH ROW EXECUTE FUNCTION swallow()`)
	gone := *b.table
	gone.Name, gone.Known = "gone", ""
	q := b.dlq(b.table, &gone)
	for range 2 { // and none is worse for a second try
		done, left := b.retry(q, deadletter.Filter{})
		if n := len(done) + len(left); n != 10 && n != 8 {
			t.Errorf("%d dead letters are spoken of: %v, %v", n, done, left)
		}
		for id, want := range map[int64]string{
			2: "a row with this id is in the outbox", 3: "is not configured", 4: "public.gone does not exist", 5: "violates check constraint",
			6: `has no column "trail" any more`, 7: "no column", 8: "out of range", 9: "did not take the row",
		} {
			if left[id] == nil || !strings.Contains(left[id].Error(), want) || hint.Of(left[id]) == "" {
				t.Errorf("dead letter %d: %v (%s), want %q", id, left[id], hint.Of(left[id]), want)
			}
		}
	}
	if s := b.text(`SELECT string_agg(row_id, ' ' ORDER BY dead_letter_id) FROM outbox_messages_dlq`); s != "2 3 4 5 6 7 8 9" {
		t.Errorf("the dead letters are now %s", s)
	}
	if s := b.text(`SELECT string_agg(concat_ws(' ', id, event_type, fresh), ', ' ORDER BY id) FROM outbox_messages`); s != "1 order.created default, 2 came.again default, 10 order.created default" {
		t.Errorf("the outbox is now %s", s)
	}
}

// TestRetryEnds although what it retries dies again at once.
func TestRetryEnds(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.dead(600)
	b.exec(`CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN
		INSERT INTO outbox_messages_dlq (outbox, row_id, original) VALUES (''public.outbox_messages'', NEW.id, row_to_json(NEW));
		DELETE FROM outbox_messages WHERE id = NEW.id; RETURN NULL; END'`)
	b.exec(`CREATE CONSTRAINT TRIGGER die AFTER INSERT ON outbox_messages DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION die()`)
	done, left := b.retry(b.dlq(b.table), deadletter.Filter{})
	if len(done) != 600 || len(left) != 0 {
		t.Errorf("retried %d, left %v; want each of 600 once", len(done), left)
	}
}

func TestDryRunChangesNothing(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.dead(3)
	b.exec(`INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) VALUES (2, 'order', 7, 'came.again', '{}')`)
	q := b.dlq(b.table)
	said := ""
	report := func(o deadletter.Outcome) { said += fmt.Sprint(o.ID, " ", o.Err == nil, ", ") }
	b.must(q.Retry(t.Context(), deadletter.Filter{}, true, report))
	b.must(q.Discard(t.Context(), deadletter.Filter{}, true, report))
	if want := "1 true, 3 true, 2 false, 1 true, 2 true, 3 true, "; said != want {
		t.Errorf("a dry run said %q, want %q", said, want)
	}
	if s := b.text(`SELECT (SELECT count(*) FROM outbox_messages_dlq) || ' ' || (SELECT count(*) FROM outbox_messages)`); s != "3 1" {
		t.Errorf("after a dry run there are %s dead letters and rows, want 3 1", s)
	}
}

func TestDiscard(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.dead(600)
	n := 0
	b.must(b.dlq().Discard(t.Context(), deadletter.Filter{AggregateType: "order", Limit: 599}, false, func(o deadletter.Outcome) {
		n++
		b.must(o.Err)
	}))
	if left := b.text(`SELECT string_agg(row_id, ' ') FROM outbox_messages_dlq`); left != "600" || n != 599 {
		t.Errorf("discarded %d, left %s", n, left)
	}
}

func TestShow(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 7, 'x', '{"a": 1e400}')`)
	b.park(b.table, b.event(b.table))
	w, err := b.dlq(b.table).Show(t.Context(), 1)
	b.must(err)
	if !strings.HasPrefix(*w.Payload, `{"a": 1000`) || len(w.Columns) != 13 || w.Columns[2].Name != "aggregate_type" || *w.Columns[2].Value != "order" || w.Columns[12].Value != nil {
		t.Errorf("%+v", w)
	}
	b.exec(`UPDATE outbox_messages_dlq SET original = json_build_object('id', 1, 'payload', repeat('x', 5 << 20)), event_type = repeat('x', 5 << 20)`)
	w, err = b.dlq(b.table).Show(t.Context(), 1)
	b.must(err)
	if w.Payload != nil || w.Original != nil || w.Size < 5<<20 || w.Columns[1].Value != nil || w.Columns[1].Size != 5<<20 || *w.Columns[0].Value != "1" {
		t.Errorf("of a large letter: %+v", w)
	}
	if l := b.list(b.dlq(b.table), deadletter.Filter{}); len(l) != 1 || len(*l[0].EventType) != 4096 {
		t.Errorf("%d letters, want one whose texts are cut", len(l))
	}
	_, err = b.dlq().Show(t.Context(), 2)
	if err == nil || err.Error() != "there is no dead letter 2" || hint.Of(err) == "" {
		t.Errorf("%v", err)
	}
}

// TestTwoRetriesAtOnce, and a third that stops in the middle: each row comes back
// once.
func TestTwoRetriesAtOnce(t *testing.T) {
	const n = 10_000
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.dead(n)
	b.exec(`CREATE TABLE came (id bigint, n bigserial)`)
	b.exec(`CREATE FUNCTION came() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN INSERT INTO came (id) VALUES (NEW.id); RETURN NULL; END'`)
	b.exec(`CREATE TRIGGER came AFTER INSERT ON outbox_messages FOR EACH ROW EXECUTE FUNCTION came()`)

	// The one that stops waits for a row whose transaction it never sees end.
	tx, err := b.connect().Begin(t.Context())
	b.must(err)
	_, err = tx.Exec(t.Context(), `INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) VALUES (1234, 'order', 7, 'x', '{}')`)
	b.must(err)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stopped, done := make(chan error, 1), 0
	first := b.dlq(b.table)
	go func() { stopped <- first.Retry(ctx, deadletter.Filter{}, false, func(deadletter.Outcome) { done++ }) }()
	b.eventually(`SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`)
	cancel()
	if err := <-stopped; !errors.Is(err, context.Canceled) || done != 1000 {
		t.Errorf("the first one ended with %v after %d, want 1000", err, done)
	}
	b.must(tx.Rollback(t.Context()))
	if s := b.text(`SELECT count(*) || ' ' || (SELECT count(*) FROM outbox_messages_dlq) FROM outbox_messages`); s != "1000 9000" {
		t.Errorf("%s rows and dead letters after the first one, want 1000 9000", s)
	}

	if n := b.text(`SELECT count(*) FROM (SELECT id < lag(id) OVER (ORDER BY n) AS back FROM came) c WHERE back`); n != "0" {
		t.Errorf("%s rows came back before older ones", n)
	}

	counts := make(chan int, 2)
	for range 2 {
		q := b.dlq(b.table)
		go func() {
			n := 0
			err := q.Retry(t.Context(), deadletter.Filter{}, false, func(o deadletter.Outcome) {
				if n++; o.Err != nil {
					t.Error(o)
				}
			})
			if err != nil {
				t.Error(err)
			}
			counts <- n
		}()
	}
	if sum := <-counts + <-counts; sum != n-1000 {
		t.Errorf("the two took %d, want %d", sum, n-1000)
	}
	if s := b.text(`SELECT concat_ws(' ', count(*), count(DISTINCT id), min(id), max(id), (SELECT count(*) FROM outbox_messages_dlq)) FROM came`); s != "10000 10000 1 10000 0" {
		t.Errorf("came back: %s, want each of 10000 once", s)
	}
}

func (b *bench) eventually(sql string) {
	b.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); b.text(sql) != "true"; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("waited in vain for %s", sql)
		}
	}
}

func TestDLQNamesMissingPrivileges(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.dead(1)
	role := "dlq_" + b.text(`SELECT current_database()`)
	b.exec(`CREATE ROLE ` + role + ` LOGIN; GRANT SELECT ON outbox_known TO ` + role)
	t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	cfg := b.config()
	cfg.URL = strings.Replace(cfg.URL, "postgres@", role+"@", 1)
	q, err := deadletter.Open(t.Context(), deadletter.Config{Config: cfg, Outboxes: []*outbox.Table{b.table}})
	b.must(err)
	defer q.Close()
	list := func() error {
		return q.List(t.Context(), deadletter.Filter{}, func(deadletter.Letter) error { return nil })
	}
	retry := func() error {
		return q.Retry(t.Context(), deadletter.Filter{}, false, func(o deadletter.Outcome) { b.must(o.Err) })
	}
	discard := func() error {
		return q.Discard(t.Context(), deadletter.Filter{}, true, func(o deadletter.Outcome) { b.must(o.Err) })
	}
	for _, c := range []struct {
		do            func() error
		grant, before string
	}{
		{list, `GRANT SELECT ON "public"."outbox_messages_dlq" TO `, "list dead letters"},
		{discard, `GRANT DELETE ON "public"."outbox_messages_dlq" TO `, "discard dead letters"},
		{retry, `GRANT SELECT, INSERT ON "public"."outbox_messages" TO `, "retry dead letters"},
	} {
		grant := c.grant + `"` + role + `"`
		advice := "use the owner's postgres.url, or as the tables' owner: " + grant // only what is missing
		if err := c.do(); err == nil || !strings.HasPrefix(err.Error(), c.before+": ") || hint.Of(err) != advice {
			t.Errorf("%v (%s), want %s", err, hint.Of(err), advice)
		}
		b.exec(grant)
		b.must(c.do())
	}
	b.exec(`DROP TABLE outbox_messages_dlq`)
	if err := list(); !strings.Contains(hint.Of(err), "walpost migrate up") {
		t.Errorf("%v (%s)", err, hint.Of(err))
	}
}
