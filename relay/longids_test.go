package relay_test

import (
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestLongForeignIDs: a publisher has stored messages whose ids and positions look like the relay's and are long. A start keeps none.
func TestLongForeignIDs(t *testing.T) {
	r := newRig(t, testenv.SharedPostgres(t))
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	x.halt()
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	last, err := s.GetLastMsgForSubject(t.Context(), "events.order.placed")
	r.must(err)
	own := last.Header.Get(nats.MsgIdHdr)
	source := own[:strings.Index(own, "/public.")]
	const messages, length = 2000, 60_000
	nc := testenv.ConnectNATS(t, r.nats.URL())
	for i := range messages {
		m := nats.NewMsg("events.order.placed")
		if i%2 == 0 {
			m.Header.Set(nats.MsgIdHdr, fmt.Sprintf("%s/public.outbox_messages/%d%s/%016x", source, i, strings.Repeat("7", length), i))
		} else {
			m.Header.Set(nats.MsgIdHdr, fmt.Sprintf("%s/public.outbox_messages/%d/%016x", source, i, i))
			m.Header.Set(jetstream.PositionHeader, fmt.Sprintf("%d%s/1/0/1/1/0/1", i, strings.Repeat("7", length)))
		}
		r.must(nc.PublishMsg(m))
	}
	r.must(nc.Flush())
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	runtime.GC()
	before, most, done := heap(), atomic.Uint64{}, make(chan struct{})
	go func() {
		defer close(done)
		for {
			runtime.GC()
			most.Store(max(most.Load(), heap()))
			select {
			case <-t.Context().Done():
				return
			case <-time.After(10 * time.Millisecond):
			}
		}
	}()
	x = r.start().streaming()
	x.halt()
	grown := most.Load() - min(before, most.Load())
	t.Logf("the heap has grown by %d MiB", grown>>20)
	if grown > messages*length/2 {
		t.Errorf("the heap has grown by %d MiB at a start", grown>>20)
	}
}
