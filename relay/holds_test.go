package relay

import (
	"strconv"
	"testing"

	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// heldTable is a table whose rows can be recorded. No server has it.
func heldTable() *outbox.Table {
	return &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
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
	h, table := newHolds(), heldTable()
	ev := heldEvent(table, 1, 1)
	of := aggregateOf(ev)
	h.open(of)
	h.close(of)
	if v, record := h.join(ev, &stream.Txn{}, 0); v != isHeld || len(record) > 0 {
		t.Fatalf("verdict %d, %d rows to record: want the row queued", v, len(record))
	}
	sent := 0
	err := h.end(of, h.quiet(table)[of], func(pendingRow) error {
		sent++
		h.record(of)
		return nil
	})
	if err != nil || sent != 1 {
		t.Fatalf("sent %d rows: %v", sent, err)
	}
	if v := h.check(of, 0); v != isHeld {
		t.Errorf("verdict %d while a row is recorded, want %d", v, isHeld)
	}
	h.recorded(of)
	if _, quiet := h.quiet(table)[of]; !quiet {
		t.Error("the hold can never end")
	}
}
