package publish

import (
	"fmt"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestReadBackEndsWhereTheStreamIsEmptied: messages that were there when the
// read-back began and vanish before their turn are not waited for.
func TestReadBackEndsWhereTheStreamIsEmptied(t *testing.T) {
	r := newLaneRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	const n = 6000 // some pulls
	r.storeMany(n)
	stream, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	purged := false
	found, err := r.stream.ReadBack(t.Context(), 1, n, ReadBackOptions{
		Source: "src",
		Phantom: func(outbox.Position) bool {
			if !purged {
				purged = true
				r.must(stream.Purge(t.Context()))
			}
			return false
		},
		Step: func([]Message) (bool, error) { return true, nil },
	})
	r.must(err)
	if found.Own == 0 || found.Own == n {
		t.Fatalf("read %d of %d messages: the purge came too early or too late", found.Own, n)
	}
}

// TestReadBackOutlivesItsConsumer: the server restarts while it is read, and forgets
// the consumer.
func TestReadBackOutlivesItsConsumer(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newLaneRig(t, n, nil)
	const most = 6000
	r.storeMany(most)
	read := 0
	found, err := r.stream.ReadBack(t.Context(), 1, most, ReadBackOptions{
		Source: "src",
		Phantom: func(outbox.Position) bool {
			if read++; read == 700 {
				r.must(n.Restart(t.Context()))
			}
			return false
		},
		Step: func([]Message) (bool, error) { return true, nil },
	})
	r.must(err)
	if found.Own != most {
		t.Errorf("read %d messages of %d", found.Own, most)
	}
}

// storeMany stores messages that a relay could have sent.
func (r *laneRig) storeMany(n int) {
	for i := range n {
		m := &nats.Msg{Subject: "events.a", Header: nats.Header{}}
		m.Header.Set(nats.MsgIdHdr, fmt.Sprintf("src/public.outbox_messages/%d/%016x", i, i))
		_, err := r.js.PublishMsgAsync(m)
		r.must(err)
		if r.js.PublishAsyncPending() >= 2000 {
			<-r.js.PublishAsyncComplete()
		}
	}
	<-r.js.PublishAsyncComplete()
}
