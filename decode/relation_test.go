package decode_test

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"

	"github.com/walpost/walpost/decode"
	"github.com/walpost/walpost/outbox"
)

// Columns are matched by name in each description.
func TestColumnsMove(t *testing.T) {
	d := opened(t)
	feed(t, d, insert(ours, "1", "extra", "a", "7", `{}`))
	moved := slices.Clone(eventColumns)
	slices.Reverse(moved)
	m := feed(t, d, relation(ours, "public", "events", append(moved, col{"new", 25})...),
		insert(ours, `{}`, "8", "b", "extra", "2", "new"))
	wantValues(t, m.Event, map[outbox.Field]string{
		outbox.ID: "2", outbox.EventType: "b", outbox.AggregateID: "8", outbox.Payload: "{}",
	})
}

func TestMissingColumn(t *testing.T) {
	d := opened(t)
	renamed := slices.Clone(eventColumns)
	renamed[2].name = "kind"
	feed(t, d, relation(ours, "public", "events", renamed...)) // unused: no error yet
	_, err := d.Decode(insert(ours, "1", nil, "a", nil, `{}`))
	if e, ok := errors.AsType[*decode.MissingColumnError](err); !ok || e.Table != "public.events" || e.Column != "type" {
		t.Errorf("a row without the column: %v, want the column named", err)
	}
	// Renamed back before a row came, it goes on.
	d = opened(t)
	feed(t, d, relation(ours, "public", "events", renamed...))
	if m := feed(t, d, relation(ours, "public", "events", eventColumns...)); m != (decode.Message{Kind: decode.Described, Altered: true}) {
		t.Errorf("another description is %+v", m)
	}
	if m := feed(t, d, relation(ours, "public", "events", eventColumns...)); m != (decode.Message{Kind: decode.Described}) {
		t.Errorf("the same description is %+v", m)
	}
	feed(t, d, insert(ours, "1", nil, "a", nil, `{}`))
}

// The same relation id is renamed out of our sight and back.
func TestTableRenamed(t *testing.T) {
	d := opened(t)
	row := insert(ours, "1", nil, "a", nil, `{}`)
	feed(t, d, row)
	if m := feed(t, d, relation(ours, "public", "old_events", eventColumns...), row); m.Kind != decode.Other {
		t.Errorf("row of the renamed table is %s", m.Kind)
	}
	if m := feed(t, d, relation(foreign, "public", "events", eventColumns...), insert(foreign, "1", nil, "a", nil, `{}`)); m.Kind != decode.Row {
		t.Errorf("row of the table that took its name is %s", m.Kind)
	}
}

// With publish_via_partition_root the leaf is described too, but the row
// carries the root's id.
func TestPartitionRoot(t *testing.T) {
	d := opened(t)
	leaf := relation(foreign, "public", "events_2026_11", eventColumns...)
	m := feed(t, d, relation(ours, "public", "events", eventColumns...), leaf, insert(ours, "1", nil, "a", nil, `{}`))
	if m.Kind != decode.Row || m.Event.Table.Name != "events" {
		t.Errorf("got %+v", m)
	}
}

// Two tables of different layouts: nothing of one shows in the other's event.
func TestTablesDoNotMix(t *testing.T) {
	l := outbox.Layout{Name: "small"}
	l.Columns[outbox.ID], l.Columns[outbox.Payload] = "id", "body"
	small := &outbox.Table{Schema: "app", Name: "small", Layout: l}
	d := opened(t, events(), small)
	feed(t, d, relation(9, "app", "small", col{"id", 20}, col{"body", 25}))
	for range 2 {
		m := feed(t, d, insert(ours, "1", nil, "a", "7", `{}`))
		wantValues(t, m.Event, map[outbox.Field]string{
			outbox.ID: "1", outbox.EventType: "a", outbox.AggregateID: "7", outbox.Payload: "{}",
		})
		m = feed(t, d, insert(9, "2", "body"))
		if m.Event.Table != small {
			t.Errorf("table %s", m.Event.Table)
		}
		wantValues(t, m.Event, map[outbox.Field]string{outbox.ID: "2", outbox.Payload: "body"})
	}
}

// A layout may use one column for several fields.
func TestColumnWithSeveralFields(t *testing.T) {
	table := events()
	table.Layout.Columns[outbox.AggregateType] = "type"
	table.Layout.Columns[outbox.TraceID] = "key"
	m := feed(t, opened(t, table), insert(ours, "1", nil, "a", nil, `{}`))
	wantValues(t, m.Event, map[outbox.Field]string{
		outbox.ID: "1", outbox.EventType: "a", outbox.AggregateType: "a", outbox.Payload: "{}",
	})
	m = feed(t, opened(t, table), insert(ours, "1", nil, "b", "7", `{}`))
	wantValues(t, m.Event, map[outbox.Field]string{
		outbox.ID: "1", outbox.EventType: "b", outbox.AggregateType: "b",
		outbox.AggregateID: "7", outbox.TraceID: "7", outbox.Payload: "{}",
	})
}

// A table is ours by its schema and its name.
func TestTableOfOtherSchema(t *testing.T) {
	d := opened(t)
	for _, r := range [][]byte{
		relation(9, "other", "events", eventColumns...), relation(9, "", "events", eventColumns...), relation(9, "public", "event", eventColumns...),
	} {
		if m := feed(t, d, r, insert(9, "1", nil, "a", nil, "{}")); m.Kind != decode.Other {
			t.Errorf("a row of %q is %s", r, m.Kind)
		}
	}
}

func TestSystemSchema(t *testing.T) {
	table := events()
	table.Schema = "pg_catalog"
	d := opened(t, table)
	if m := feed(t, d, relation(9, "", "events", eventColumns...), insert(9, "1", nil, "a", nil, "{}")); m.Kind != decode.Row {
		t.Errorf("row is %s", m.Kind)
	}
}

// A description that fails leaves the earlier one in force.
func TestBrokenRelation(t *testing.T) {
	d := opened(t)
	b := relation(ours, "public", "events", col{"id", 20})
	for _, m := range [][]byte{b[:len(b)-1], append(b, 0)} {
		if _, err := d.Decode(m); err == nil {
			t.Fatalf("decode %q is no error", m)
		}
	}
	feed(t, d, insert(ours, "1", nil, "a", nil, `{}`))
}

// Of a relation that is not ours only its id is kept.
func TestForeignRelationsAreForgotten(t *testing.T) {
	d := opened(t)
	columns := make([]col, 200)
	for i := range columns {
		columns[i] = col{fmt.Sprintf("a_column_with_a_long_name_%d", i), 25}
	}
	const n = 2000
	grown := heap(func() {
		for i := range uint32(n) {
			feed(t, d, relation(100000+i, "public", "other", columns...))
		}
	})
	if grown > n*100 {
		t.Errorf("%d bytes kept for each of %d relations", grown/n, n)
	}
	runtime.KeepAlive(d)
}

// heap is by how much f made the live heap grow.
func heap(f func()) int64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	f()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return int64(after.HeapAlloc) - int64(before.HeapAlloc)
}
