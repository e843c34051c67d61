package jetstream

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestScanEndsWhereTheStreamIsEmptied: messages that were there when the
// recovery scan began and vanish before their turn are not waited for.
func TestScanEndsWhereTheStreamIsEmptied(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	const n = 6000 // some pulls
	r.storeMany(n)
	stream, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	purged := false
	found, err := r.stream.ScanBackward(t.Context(), 1, n, ScanOptions{
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

// TestScanOutlivesItsConsumer: the server restarts while it is read, and forgets
// the consumer.
func TestScanOutlivesItsConsumer(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newRig(t, n)
	const most = 6000
	r.storeMany(most)
	read := 0
	found, err := r.stream.ScanBackward(t.Context(), 1, most, ScanOptions{
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

// TestScanOfASilentConsumer: what delivers nothing is not waited for without end.
// The server drops the requests here; others lose them.
func TestScanOfASilentConsumer(t *testing.T) {
	t.Parallel()
	_, cfg := restricted(t, `{ publish { allow: ">", deny: "$JS.API.CONSUMER.MSG.NEXT.>" } }`)
	createAs(t, "admin", cfg)
	nc := connect(t, cfg)
	for range 3 {
		if _, err := nc.Request("events.a", nil, 5*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	_, err := s.ScanBackward(ctx, 1, 3, ScanOptions{Source: "src", Step: func([]Message) (bool, error) { return true, nil }})
	wantError(t, err, "the consumer does not deliver its next 3 messages")
	if !strings.Contains(hint.Of(err), "CONSUMER.MSG.NEXT") {
		t.Errorf("hint %q", hint.Of(err))
	}
}

// TestScanOfAStatus: messages that anybody has published may look like what a server
// says of a request.
func TestScanOfAStatus(t *testing.T) {
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	r.storeMany(3)
	for _, status := range []string{"100", "200", "404", "408", "409", "503"} {
		_, err := r.nc.RequestMsg(&nats.Msg{Subject: "events.a", Header: nats.Header{"Status": {status}, "Description": {"Consumer Deleted"}}}, 5*time.Second)
		r.must(err)
	}
	r.storeMany(5) // two more
	found, err := r.stream.ScanBackward(t.Context(), 1, 11, ScanOptions{Source: "src", Step: func([]Message) (bool, error) { return true, nil }})
	r.must(err)
	if found.Own != 5 {
		t.Errorf("read %d messages of its own of 5", found.Own)
	}
	seq, err := r.stream.SeqSince(t.Context(), time.Now().Add(-time.Hour))
	if err != nil || seq != 1 {
		t.Errorf("the first message is %d: %v", seq, err)
	}
}

// TestScanInSmallRequests: a server may bound what is asked for at once.
func TestScanInSmallRequests(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{JetStream: "limits { max_request_batch: 2 }"})
	r := newRigOver(t, ConnConfig{URL: n.URL()})
	r.storeMany(7)
	found, err := r.stream.ScanBackward(t.Context(), 1, 7, ScanOptions{Source: "src", Step: func([]Message) (bool, error) { return true, nil }})
	r.must(err)
	if found.Own != 7 {
		t.Errorf("read %d messages of 7", found.Own)
	}
}

// TestScanOfALostRequest: the connection is half open, and then lost, with requests
// under way that nobody will answer.
func TestScanOfALostRequest(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	proxy := testenv.NewProxy(t, strings.TrimPrefix(n.URL(), "nats://"))
	r := newRigOver(t, ConnConfig{URL: "nats://" + proxy.Addr()})
	const most = 3000
	r.storeMany(most)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	read := 0
	found, err := r.stream.ScanBackward(ctx, 1, most, ScanOptions{
		Source: "src",
		Phantom: func(outbox.Position) bool {
			if read++; read == 700 {
				proxy.Pause()
				time.AfterFunc(7*time.Second, func() { proxy.Drop(); proxy.Resume() })
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
func (r *rig) storeMany(n int) {
	for i := range n {
		m := &nats.Msg{Subject: "events.a", Header: nats.Header{}}
		m.Header.Set(nats.MsgIdHdr, fmt.Sprintf("src/public.outbox_messages/%d/%016x", i, i+1))
		_, err := r.js.PublishMsgAsync(m)
		r.must(err)
		if r.js.PublishAsyncPending() >= 2000 {
			<-r.js.PublishAsyncComplete()
		}
	}
	<-r.js.PublishAsyncComplete()
}
