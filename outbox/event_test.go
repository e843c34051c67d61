package outbox_test

import (
	"bytes"
	"slices"
	"testing"

	"github.com/walpost/walpost/outbox"
)

func event() *outbox.Event {
	e := &outbox.Event{Table: canonicalTable(), XID: 7, Commit: 9, N: 2}
	e.Values[outbox.ID] = []byte("4711")
	e.Values[outbox.EventType] = []byte("order.created")
	e.Values[outbox.Payload] = []byte(`{"a": 1}`)
	e.Values[outbox.TraceID] = []byte{}
	return e
}

func TestClone(t *testing.T) {
	e := event()
	c := e.Clone()
	if c == e || c.Table != e.Table || c.XID != 7 || c.Commit != 9 || c.N != 2 || c.Size() != e.Size() {
		t.Fatalf("clone %+v", c)
	}
	hash := c.Hash()
	for f, v := range e.Values {
		if (v == nil) != (c.Values[f] == nil) || !bytes.Equal(v, c.Values[f]) {
			t.Errorf("%s is %q, want %q", outbox.Field(f), c.Values[f], v)
		}
		clear(v)
	}
	if c.Hash() != hash || string(c.Values[outbox.ID]) != "4711" {
		t.Error("the clone shares its event's memory")
	}
	_ = append(c.Values[outbox.ID], "overwritten"...)
	if string(c.Values[outbox.EventType]) != "order.created" {
		t.Error("an append to a value reaches the next one")
	}
	if n := testing.AllocsPerRun(100, func() { c = e.Clone() }); n > 2 {
		t.Errorf("%v allocations", n)
	}
}

// The hash covers what consumers see and tells NULL from an empty text; it
// leaves out the id and the relay's own columns.
func TestHashCoverage(t *testing.T) {
	hash := event().Hash()
	covered := []outbox.Field{
		outbox.TenantID, outbox.AggregateType, outbox.AggregateID, outbox.EventType, outbox.EventVersion,
		outbox.Payload, outbox.OccurredAt, outbox.TraceID,
	}
	for f := range outbox.NumFields {
		e := event()
		e.Values[f] = append(slices.Clone(e.Values[f]), 'x')
		if changed := e.Hash() != hash; changed != slices.Contains(covered, f) {
			t.Errorf("%s: hash changed: %t", f, changed)
		}
	}
	null := event()
	null.Values[outbox.TraceID] = nil
	if null.Hash() == hash {
		t.Error("NULL and an empty text have the same hash")
	}
	// A value that moves to the next column is other content.
	moved := event()
	moved.Values[outbox.EventType], moved.Values[outbox.EventVersion] = nil, moved.Values[outbox.EventType]
	if moved.Hash() == hash {
		t.Error("the hash does not tell columns apart")
	}
}

func TestRefOfEvent(t *testing.T) {
	e := event()
	r := e.Ref()
	if r.Table != e.Table || r.ID != "4711" || r.Hash != e.Hash() {
		t.Errorf("ref %+v", r)
	}
	clear(e.Values[outbox.ID])
	if r.ID != "4711" {
		t.Error("the ref shares its event's memory")
	}
}
