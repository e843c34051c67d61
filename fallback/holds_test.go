package fallback

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"testing"

	"github.com/walpost/walpost/outbox"
)

// transaction is a PendingRow's.
type transaction struct{}

func (transaction) Settled() {}

// heldTable is a table whose rows can be recorded. No server has it.
func heldTable() *outbox.Table {
	return &outbox.Table{
		Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate,
	}
}

// heldEvent is the row with an id, of the aggregate with a number.
func heldEvent(t *outbox.Table, id, of int) *outbox.Event {
	ev := &outbox.Event{Table: t}
	ev.Values[outbox.ID] = strconv.AppendInt(nil, int64(id), 10)
	ev.Values[outbox.AggregateID] = strconv.AppendInt(nil, int64(of), 10)
	return ev
}

// TestRecordWhileAQueueIsSent: the WAL brings a dead letter that is tried again while the
// queue of its aggregate is sent. The hold stays until that record is gone, too.
func TestRecordWhileAQueueIsSent(t *testing.T) {
	h, table := NewHolds(MostHeld), heldTable()
	ev := heldEvent(table, 1, 1)
	of := AggregateOf(ev)
	h.open(of)
	h.queueRows(of)
	if v, record := h.Join(PendingRow{ev, transaction{}}, 0); v != IsHeld || len(record) > 0 {
		t.Fatalf("verdict %d, %d rows to record: want the row queued", v, len(record))
	}
	h.quiet(table)
	if !h.end(of) {
		t.Fatal("the hold does not end")
	}
	sent := 0
	err := h.empty(of, func(_ PendingRow, send bool) error {
		if send {
			sent++
		}
		h.BeginRecord(of)
		return nil
	})
	if err != nil || sent != 1 {
		t.Fatalf("sent %d rows: %v", sent, err)
	}
	if v := h.check(of, 0); v != IsHeld {
		t.Errorf("verdict %d while a row is recorded, want %d", v, IsHeld)
	}
	h.EndRecord(of)
	if _, quiet := h.quiet(table)[of]; !quiet {
		t.Error("the hold can never end")
	}
}

// TestDrainBreaksOff: a queue cannot be sent, such as when the session ends. The WAL handler waits no
// longer, what was not sent stays queued, and the next drain goes on with it.
func TestDrainBreaksOff(t *testing.T) {
	h, table := NewHolds(MostHeld), heldTable()
	first, later := heldEvent(table, 1, 1), heldEvent(table, 2, 1)
	of := AggregateOf(first)
	h.open(of)
	h.queueRows(of)
	h.Join(PendingRow{first, transaction{}}, 0)
	h.quiet(table)
	waited := make(chan error, 2)
	broken := errors.New("the connection is lost")
	if !h.end(of) {
		t.Fatal("the hold does not end")
	}
	err := h.empty(of, func(PendingRow, bool) error {
		if v, _ := h.Join(PendingRow{later, transaction{}}, 0); v != IsEmptying {
			t.Errorf("verdict %d, want %d", v, IsEmptying)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := h.AwaitEmptied(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("the session ends, and the WAL handler has %v", err)
		}
		go func() { waited <- h.AwaitEmptied(t.Context()) }()
		return broken
	})
	if !errors.Is(err, broken) {
		t.Errorf("the drain has %v, want %v", err, broken)
	}
	if err := <-waited; err != nil {
		t.Error(err)
	}
	if v, record := h.Join(PendingRow{later, transaction{}}, 0); v != IsHeld || len(record) > 0 {
		t.Errorf("verdict %d, %d rows to record: want the row queued", v, len(record))
	}
	var ids []string
	h.quiet(table)
	if !h.end(of) {
		t.Fatal("the hold does not end")
	}
	if err := h.empty(of, func(row PendingRow, send bool) error {
		ids = append(ids, string(row.Event.Values[outbox.ID]))
		if !send {
			t.Errorf("row %s is recorded, want it sent", row.Event.Values[outbox.ID])
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if !slices.Equal(ids, []string{"1", "2"}) || h.Any() || h.rows != 0 || h.bytes != 0 {
		t.Errorf("sent %v, a hold is left: %t, %d rows are queued", ids, h.Any(), h.rows)
	}
}

// TestHoldTransitions has the table of states and events: what each event makes of each state that it
// can meet.
func TestHoldTransitions(t *testing.T) {
	const none, x = holdState(100), holdState(101) // x cannot be
	table := heldTable()
	row := PendingRow{heldEvent(table, 1, 1), transaction{}}
	of := AggregateOf(row.Event)
	in := func(s holdState) *Holds {
		h := NewHolds(MostHeld)
		if s != none {
			h.open(of)
		}
		if s == queueing || s == emptying {
			h.queueRows(of)
			h.Join(row, 0)
		}
		if s == emptying {
			h.quiet(table)
			h.end(of)
		}
		return h
	}
	mostBefore := mostQueued
	t.Cleanup(func() { mostQueued = mostBefore })
	states := []holdState{none, recording, queueing, emptying}
	type now = [4]holdState // from none, recording, queueing and draining
	for _, c := range []struct {
		name  string
		event func(h *Holds)
		want  now
	}{
		{"open", func(h *Holds) { h.open(of) }, now{recording, recording, queueing, emptying}},
		{"beginRecord", func(h *Holds) { h.BeginRecord(of) }, now{recording, recording, queueing, emptying}},
		{"endRecord", func(h *Holds) { h.EndRecord(of) }, now{none, recording, queueing, emptying}},
		{"join", func(h *Holds) { h.Join(row, 0) }, now{none, recording, queueing, emptying}},
		{"join without room", func(h *Holds) {
			mostQueued = 0
			h.Join(row, 0)
		}, now{none, recording, recording, emptying}},
		{"queueRows", func(h *Holds) { h.queueRows(of) }, now{none, queueing, queueing, x}},
		{"end when quiet", func(h *Holds) {
			h.quiet(table)
			h.end(of)
		}, now{none, emptying, emptying, x}},
		{"end before quiet", func(h *Holds) { h.end(of) }, now{none, recording, queueing, x}},
		{"end after a record", func(h *Holds) {
			h.quiet(table)
			h.BeginRecord(of)
			h.end(of)
		}, now{recording, recording, queueing, x}},
		{"end under a record", func(h *Holds) {
			h.BeginRecord(of)
			h.quiet(table)
			h.end(of)
		}, now{recording, recording, queueing, x}},
		{"keep", func(h *Holds) { h.keep(of) }, now{none, recording, emptying, x}},
		{"endDrain, worked off", func(h *Holds) {
			h.left(of)
			h.endEmptying(of)
		}, now{x, x, x, none}},
		{"endDrain, recorded again", func(h *Holds) {
			h.left(of)
			h.BeginRecord(of)
			h.endEmptying(of)
		}, now{x, x, x, recording}},
		{"endDrain, broken off", func(h *Holds) { h.endEmptying(of) }, now{x, x, x, queueing}},
		{"forget", func(h *Holds) {
			h.most = 0
			h.forgetLocked()
		}, now{none, none, queueing, emptying}},
		{"forget under a record", func(h *Holds) {
			h.BeginRecord(of)
			h.most = 0
			h.forgetLocked()
		}, now{recording, recording, queueing, emptying}},
	} {
		for i, s := range states {
			if c.want[i] == x {
				continue
			}
			mostQueued = mostBefore
			h := in(s)
			c.event(h)
			got := none
			if hold := h.byKey[of]; hold != nil {
				got = hold.state
			}
			if got != c.want[i] {
				t.Errorf("%s in state %d: now %d, want %d", c.name, s, got, c.want[i])
			}
		}
	}
}
