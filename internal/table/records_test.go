package table_test

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestAggregateKeys: the table and the relay give an aggregate the same key, whatever its columns hold,
// aggregates differ in theirs, and the table tells which of them have recorded rows.
func TestAggregateKeys(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	layout, err := outbox.CustomLayout(map[string]string{
		"id": "id", "tenant_id": "tenant", "aggregate_type": "Kind", "aggregate_id": "aggregate", "event_type": "event_type", "payload": "payload",
		"available_at": "available_at", "processed_at": "processed_at", "attempts": "attempts", "last_error": "last_error",
	})
	b.must(err)
	b.exec(`CREATE TABLE strange (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant numeric(12, 2), "Kind" text, aggregate text, event_type text, payload text,
		available_at timestamptz NOT NULL DEFAULT now(), processed_at timestamptz, attempts int NOT NULL DEFAULT 0, last_error text)`)
	box := &outbox.Table{Schema: "public", Name: "strange", Layout: layout, Mark: outbox.MarkUpdate}
	b.must(b.db.CheckTable(t.Context(), box))
	long := strings.Repeat("x", 1024)
	names := [][3]any{
		{nil, nil, ""},
		{nil, "", ""},
		{1, nil, ""},
		{1, "a", "b"},
		{1, "a/b", ""},
		{1, "", "a/b"},
		{1, "a", "1:b/"},
		{11, "a", "b"},
		{nil, "order", "ü📦"},
		{1, long, "b"},
		{1, long + "x", "b"},
		{1, long + "y", "b"},
		{1, "b", long + "x"},
		{1, strings.Repeat("ü", 600), long + long},
	}
	for _, n := range names {
		b.exec(`INSERT INTO strange (tenant, "Kind", aggregate, event_type, payload) VALUES ($1, $2, $3, 'x', 'y')`, n[:]...)
	}
	b.exec(`INSERT INTO strange (tenant, "Kind", event_type, payload) VALUES (1, 'a', 'x', 'y')`) // of none
	cs, err := b.db.Fresh(t.Context(), box, time.Second, 100)
	b.must(err)
	var ids []string
	for _, c := range cs {
		ids = append(ids, c.ID)
	}
	f, err := b.db.Fetch(t.Context(), box, ids, 1<<20)
	b.must(err)
	events := f.Rows
	if len(cs) != len(names)+1 || len(events) != len(cs) {
		t.Fatalf("%d candidates and %d events, want %d", len(cs), len(events), len(names)+1)
	}
	seen := map[outbox.AggregateKey]string{}
	for i, ev := range events {
		if cs[i].Aggregate != ev.Aggregate() {
			t.Errorf("row %s: key %x in the table, %x here", ids[i], cs[i].Aggregate, ev.Aggregate())
		}
		if other := seen[ev.Aggregate()]; other != "" {
			t.Errorf("rows %s and %s have one key", other, ids[i])
		}
		seen[ev.Aggregate()] = ids[i]
	}
	if key := events[len(names)].Aggregate(); key != (outbox.AggregateKey{}) {
		t.Errorf("a row of no aggregate has key %x", key)
	}

	b.exec(`UPDATE strange SET last_error = 'subject: x' WHERE id % 2 = 0`)
	events = events[:len(names)]
	have, err := b.db.HaveRecords(t.Context(), box, events)
	b.must(err)
	var recorded []outbox.AggregateKey
	b.must(b.db.Aggregates(t.Context(), box, func(key outbox.AggregateKey) { recorded = append(recorded, key) }))
	for i, ev := range events {
		if want := i%2 == 1; have[i] != want || slices.Contains(recorded, ev.Aggregate()) != want {
			t.Errorf("row %s: has records: %t, is listed: %t, want %t", ids[i], have[i], slices.Contains(recorded, ev.Aggregate()), want)
		}
	}
}

// TestEqualAggregates: values that PostgreSQL takes for equal, but whose texts differ, name different aggregates, and
// each of them is found. What an index compares by is no name.
func TestEqualAggregates(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false)`)
	layout, err := outbox.CustomLayout(map[string]string{
		"id": "id", "aggregate_type": "kind", "aggregate_id": "aggregate", "event_type": "event_type", "payload": "payload",
		"processed_at": "processed_at", "attempts": "attempts", "last_error": "last_error",
	})
	b.must(err)
	for name, c := range map[string][3]string{
		"numeric":   {"numeric", "1", "1.000"},
		"collation": {"text COLLATE any_case", "abc", "ABC"},
	} {
		t.Run(name, func(t *testing.T) {
			box := &outbox.Table{Schema: "public", Name: name, Layout: layout, Mark: outbox.MarkUpdate}
			b.exec(`CREATE TABLE ` + box.SQL() + ` (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, kind text COLLATE "C", aggregate ` + c[0] + `,
				event_type text, payload text, processed_at timestamptz, attempts int NOT NULL DEFAULT 0, last_error text)`)
			for _, value := range []string{c[1], c[2], c[1]} {
				b.exec(`INSERT INTO `+box.SQL()+` (aggregate, event_type, payload) SELECT $1::text::`+strings.Fields(c[0])[0]+`, 'x', 'y' FROM generate_series(1, 2)`, value)
			}
			b.exec(`UPDATE ` + box.SQL() + ` SET last_error = 'held: x' WHERE id % 2 = 0`)
			b.must(b.db.CheckTable(t.Context(), box))
			want := map[outbox.AggregateKey]bool{
				outbox.AggregateKeyOf(nil, nil, []byte(c[1])): true, outbox.AggregateKeyOf(nil, nil, []byte(c[2])): true,
			}
			found := map[outbox.AggregateKey]bool{}
			b.must(b.db.Aggregates(t.Context(), box, func(key outbox.AggregateKey) { found[key] = true }))
			overtaken, err := b.db.Overtaken(t.Context(), box, time.Second, want)
			b.must(err)
			if !maps.Equal(found, want) || !maps.Equal(overtaken, want) {
				t.Errorf("found %d aggregates with records, and %d overtaken ones, want 2", len(found), len(overtaken))
			}
		})
	}
}

// TestLongAggregatesAreRecorded: rows whose aggregate no index would take wait like any other.
func TestLongAggregatesAreRecorded(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT (SELECT string_agg(md5(n::text), '') FROM generate_series(1, 200) n), 1, 'order placed', '{}' FROM generate_series(1, 2)`)
	row := func(id, failure string) []table.Row {
		return []table.Row{{Ref: outbox.Ref{Table: b.table, ID: id}, Failure: failure}}
	}
	v, err := b.db.Park(t.Context(), b.table, row("1", "subject: a space"), retry)
	b.must(err)
	b.want(v, table.Done)
	v, err = b.db.Hold(t.Context(), b.table, row("2", ""))
	b.must(err)
	b.want(v, table.Done)
	if got := b.text(`SELECT string_agg(concat_ws('|', id, left(last_error, 6)), ' ' ORDER BY id) FROM outbox_messages`); got != "1|subjec 2|held: " {
		t.Errorf("the table has %q", got)
	}
}

// TestAggregatesOfAnyType: rows of an aggregate are found by its hash whatever the types of its columns are, and nothing
// that a domain checks is called.
func TestAggregatesOfAnyType(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE TABLE called ();
		CREATE FUNCTION spy(anyelement) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN INSERT INTO public.called DEFAULT VALUES; RETURN true; END $$;
		CREATE DOMAIN padded AS character(4) CHECK (spy(VALUE)); CREATE DOMAIN needed AS int NOT NULL DEFAULT 1;
		CREATE TYPE kind AS ENUM ('order', 'Account');
		CREATE COLLATION any_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
		CREATE TABLE strange (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant padded, kind kind, aggregate varchar(9) COLLATE any_case, event_type text, payload text,
			available_at timestamptz NOT NULL DEFAULT now(), processed_at timestamptz, attempts int NOT NULL DEFAULT 0, last_error text, other needed)`)
	layout, err := outbox.CustomLayout(map[string]string{
		"id": "id", "tenant_id": "tenant", "aggregate_type": "kind", "aggregate_id": "aggregate", "event_type": "event_type", "payload": "payload",
		"available_at": "available_at", "processed_at": "processed_at", "attempts": "attempts", "last_error": "last_error",
	})
	b.must(err)
	box := &outbox.Table{Schema: "public", Name: "strange", Layout: layout, Mark: outbox.MarkUpdate}
	b.must(b.db.CheckTable(t.Context(), box))
	findings, err := b.db.IndexFindings(t.Context(), box)
	b.must(err)
	if len(findings) != 1 || findings[0].Code != "table-index" {
		t.Fatalf("without an index doctor finds %v", findings)
	}
	b.exec(findings[0].Fix)
	if findings, err = b.db.IndexFindings(t.Context(), box); err != nil || len(findings) != 0 {
		t.Errorf("with the index doctor finds %v: %v", findings, err)
	}

	b.exec(`INSERT INTO strange (tenant, kind, aggregate, event_type, payload) VALUES
		('a', 'order', 'One', 'x', 'y'), (NULL, 'order', 'One', 'x', 'y'), ('a', 'Account', 'one', 'x', 'y'), ('b', 'order', 'one', 'x', 'y')`)
	fetched, err := b.db.Fetch(t.Context(), box, []string{"1", "2", "3", "4"}, 1<<20)
	b.must(err)
	b.exec(`UPDATE strange SET last_error = 'subject: x' WHERE id < 4; DELETE FROM called`)
	have, err := b.db.HaveRecords(t.Context(), box, fetched.Rows)
	b.must(err)
	if want := []bool{true, true, true, false}; !slices.Equal(have, want) {
		t.Errorf("have records: %t, want %t", have, want)
	}
	if n := b.text(`SELECT count(*) FROM called`); n != "0" {
		t.Errorf("what the domain checks was called %s times", n)
	}
}

// TestAggregatesWithoutAHash: a column by whose hash nothing can be found is refused at the start.
func TestAggregatesWithoutAHash(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE DOMAIN flags AS bit varying NOT NULL; CREATE TYPE pair AS (a int, b text); CREATE TYPE odd AS (a int, b money)`)
	for typ, want := range map[string]string{
		"bit(8)": "type bit(8)", "flags": "type public.flags", "money[]": "type money[]", "json": "type json", "odd": "type public.odd",
		"pair": "", "jsonb": "", "bytea": "", "interval[]": "", "numeric(9, 2)": "", "int4range": "", "inet": "",
	} {
		b.exec(`ALTER TABLE outbox_messages DROP COLUMN aggregate_type; ALTER TABLE outbox_messages ADD aggregate_type ` + typ)
		err := b.db.CheckTable(t.Context(), b.table)
		switch {
		case want == "" && err != nil:
			t.Errorf("%s: %v", typ, err)
		case want != "" && (err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), `"aggregate_type"`) || hint.Of(err) == ""):
			t.Errorf("%s: %v (%s), want an error that names the column and %s", typ, err, hint.Of(err), want)
		}
		ev := &outbox.Event{Table: b.table}
		_, err = b.db.HaveRecords(t.Context(), b.table, []*outbox.Event{ev})
		if (want == "") != (err == nil) {
			t.Errorf("%s: aggregates are looked for: %v", typ, err)
		}
	}
}
