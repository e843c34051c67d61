package relay

import (
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
		first, messages, newest uint64
		want                    bool
	}{
		"not yet at what was sent":                   {1, 100, 61, false},
		"at what was sent, and not at what was read": {1, 100, 60, false},
		"what was read is dropped":                   {51, 50, 60, true},
		"a message was removed":                      {1, 99, 60, true},
	} {
		t.Run(name, func(t *testing.T) {
			info := &jetstream.StreamInfo{Created: created}
			info.FirstSeq, info.LastSeq, info.Messages = x.first, 100, x.messages
			one := &note{}
			one.take(&sent, info)
			n := &notes{of: map[*outbox.Table]*note{{}: one}, complete: true}
			if got := n.enough(x.newest); got != x.want {
				t.Errorf("enough: %t, want %t", got, x.want)
			}
		})
	}
}
