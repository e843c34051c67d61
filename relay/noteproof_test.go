package relay

import (
	"slices"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// TestEnough: how far a read-back goes that meets no message of the relay's outboxes.
func TestEnough(t *testing.T) {
	created, now := time.Unix(1000, 0), time.Now()
	sent := table.Sent{Source: "s", Noted: table.Noted{
		StreamCreated: &created, ReadSequence: 50, ReadMessage: "s/o/1/0000000000000000", ReadAt: &now, LastSequence: 60,
	}}
	for name, x := range map[string]struct {
		first, deleted, newest uint64
		want                   bool
	}{
		"not yet at what was sent":                   {1, 0, 61, false},
		"at what was sent, and not at what was read": {1, 0, 60, false},
		"what was read is dropped":                   {51, 0, 60, true},
		"a message was removed":                      {1, 70, 60, true},
	} {
		t.Run(name, func(t *testing.T) {
			info := &jetstream.StreamInfo{Created: created}
			info.FirstSeq, info.LastSeq, info.LastDeleted = x.first, 100, x.deleted
			n := &notes{of: map[*outbox.Table]*note{{}: noteOf(&sent, []table.Sent{sent}, info)}, complete: true}
			if got := n.enough(x.newest); got != x.want {
				t.Errorf("enough: %t, want %t", got, x.want)
			}
		})
	}
}

// TestBetween: which marks are compared with the stream, if it was delivered to under more conditions than one.
func TestBetween(t *testing.T) {
	at := func(minute int) time.Time { return time.Unix(int64(60*minute), 0) }
	sent := func(condition string, read, ended int) table.Sent {
		s := table.Sent{Source: "s", Condition: condition, Noted: table.Noted{StreamCreated: new(at(0)), ReadAt: new(at(read))}}
		if ended > 0 {
			s.EndedAt = new(at(ended))
		}
		return s
	}
	for name, x := range map[string]struct {
		now  string
		here []table.Sent
		want []marked
	}{
		"its own":                                {"", []table.Sent{sent("", 5, 9)}, []marked{{at(5), at(9)}}},
		"it has crashed":                         {"", []table.Sent{sent("", 5, 0)}, []marked{{at(5), time.Time{}}}},
		"narrowed":                               {"a", []table.Sent{sent("", 5, 9)}, []marked{{at(5), at(9)}}},
		"narrowed and widened":                   {"", []table.Sent{sent("", 5, 9), sent("a", 20, 25)}, []marked{{at(5), at(9)}, {at(20), at(25)}}},
		"narrowed, widened and narrowed":         {"a", []table.Sent{sent("a", 5, 9), sent("", 20, 25)}, []marked{{at(20), at(25)}}},
		"another condition":                      {"b", []table.Sent{sent("a", 5, 9), sent("c", 20, 25)}, []marked{{at(5), at(9)}, {at(20), at(25)}}},
		"another one goes on while it has ended": {"b", []table.Sent{sent("b", 5, 9), sent("a", 2, 0)}, []marked{{at(5), time.Time{}}}},
		"widened":                                {"", []table.Sent{sent("a", 5, 9)}, []marked{{at(5), at(9)}}},
	} {
		info := &jetstream.StreamInfo{Created: at(0)}
		info.FirstSeq, info.LastSeq = 1, 100
		box := &outbox.Table{}
		n := &notes{of: map[*outbox.Table]*note{box: noteOf(&table.Sent{Source: "s", Condition: x.now}, x.here, info)}}
		if got := n.between(box, at(1)); !slices.Equal(got, x.want) {
			t.Errorf("%s: %v, want %v", name, got, x.want)
		}
	}
}
