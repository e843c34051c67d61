package fallback_test

import (
	"slices"
	"strings"
	"testing"
	"time"

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
	table := &outbox.Table{Schema: "public", Name: "strange", Layout: layout, Mark: outbox.MarkUpdate}
	b.must(b.db.CheckTable(t.Context(), table))
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
	cs, err := b.db.Fresh(t.Context(), table, time.Second, 100)
	b.must(err)
	var ids []string
	for _, c := range cs {
		ids = append(ids, c.ID)
	}
	events, _, err := b.db.Fetch(t.Context(), table, ids, 1<<20)
	b.must(err)
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
	have, err := b.db.HaveRecords(t.Context(), table, events)
	b.must(err)
	var recorded []outbox.AggregateKey
	b.must(b.db.Aggregates(t.Context(), table, func(key outbox.AggregateKey) { recorded = append(recorded, key) }))
	for i, ev := range events {
		if want := i%2 == 1; have[i] != want || slices.Contains(recorded, ev.Aggregate()) != want {
			t.Errorf("row %s: has records: %t, is listed: %t, want %t", ids[i], have[i], slices.Contains(recorded, ev.Aggregate()), want)
		}
	}
}
