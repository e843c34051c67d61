package publish

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// chunked is a publisher of fast batches that nothing but Flush and a full stage has written,
// and what it gets for PubAcks.
func chunked(t *testing.T) (*publisherRig, *Publisher, *nats.Subscription) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), func(c *natsjs.StreamConfig) { c.AllowBatchPublish = true })
	r.cfg.Batching, r.cfg.Window = jetstream.BatchFast, 4096
	l := r.publisher()
	l.linger.Stop()
	l.linger = time.AfterFunc(time.Hour, func() {})
	acks, err := r.nc.SubscribeSync(l.inbox + ">")
	r.must(err)
	r.must(r.nc.Flush())
	return r, l, acks
}

// nextAck is the next PubAck that is not one of those in between.
func (r *publisherRig) nextAck(acks *nats.Subscription) pubAck {
	r.t.Helper()
	for {
		msg, err := acks.NextMsg(5 * time.Second)
		r.must(err)
		if ack, err := parseAck(msg, "EVENTS"); err == nil && ack.Seq > 0 {
			return ack
		}
	}
}

// awaitStored waits until the stream has so many messages.
func (r *publisherRig) awaitStored(n uint64) {
	r.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		info, err := r.stream.Info(r.t.Context())
		r.must(err)
		if info.Messages >= n {
			return
		}
	}
	r.t.Fatalf("waited in vain for %d messages", n)
}

// TestFastBatchGoesOn: a fast batch is stored while its rows come, and has one PubAck
// when they have come.
func TestFastBatchGoesOn(t *testing.T) {
	r, l, acks := chunked(t)
	const chunks = 3
	for id := range chunks*chunkMessages + 1 {
		r.must(r.send(l, id))
	}
	r.awaitStored(2 * chunkMessages)
	if c := l.Counts(); c.Inflight != chunks*chunkMessages+1 {
		t.Errorf("%d rows wait for the PubAck, want all", c.Inflight)
	}
	r.must(l.Flush())
	r.settleAll(l, chunks*chunkMessages+1)
	if ack := r.nextAck(acks); ack.Count != chunks*chunkMessages+1 {
		t.Errorf("the first PubAck counts %d messages", ack.Count)
	}
	if n := len(r.headers()); n != chunks*chunkMessages+1 {
		t.Errorf("%d rows are stored", n)
	}
}

// TestFastBatchEndsWhenItIsLarge: what never pauses has PubAcks all the same, before the
// window is full.
func TestFastBatchEndsWhenItIsLarge(t *testing.T) {
	r, l, acks := chunked(t)
	const rows = 10_000
	taken := make(chan []int)
	go func() { taken <- r.settleAll(l, rows) }()
	for id := range rows {
		r.must(r.send(l, id))
	}
	r.must(l.Flush())
	<-taken
	var largest uint64
	for seq := uint64(0); seq < rows; {
		ack := r.nextAck(acks)
		seq, largest = ack.Seq, max(largest, ack.Count)
	}
	if most := uint64(r.cfg.Window - maxStage); largest > most || largest < most-chunkMessages {
		t.Errorf("the largest of the batches had %d messages, want %d, or less than a chunk fewer", largest, most)
	}
}

// TestStageIsBounded: what gathers while a batch is under way is in memory.
func TestStageIsBounded(t *testing.T) {
	for _, c := range []struct{ payload, want int }{{2, maxStage}, {50_000, maxStageBytes/50_000 + 1}} {
		r, l, _ := chunked(t)
		l.mu.Lock()
		l.unit = unit{n: jetstream.U, state: unitComplete} // under way for ever
		l.mu.Unlock()
		payload := `"` + strings.Repeat("x", c.payload-2) + `"`
		n := 0
		for ; n < jetstream.U; n++ {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			err := l.Send(ctx, r.event(n, payload), n)
			cancel()
			if err != nil {
				break
			}
		}
		if n < c.want*9/10 || n > c.want {
			t.Errorf("%d messages of %d bytes were taken, want %d", n, c.payload, c.want)
		}
	}
}

// TestFastBatchEndsBeforeALargeMessage: one whose headers leave no room for those of a
// batch goes alone, in its order.
func TestFastBatchEndsBeforeALargeMessage(t *testing.T) {
	r, l, acks := chunked(t)
	const large = 2*chunkMessages + 7
	payload := make([]byte, 8<<10)
	for i := range payload {
		payload[i] = 'x'
	}
	header, _, err := r.cfg.Envelope.Build(r.event(large, string(payload)), Stamp{Chained: true, Staged: true, Ref: r.event(large, "").Ref()})
	r.must(err)
	r.cfg.Envelope.Limit(int64(len(header)+len(payload)+batchHeaders), 0)
	for id := range 3 * chunkMessages {
		body := `{}`
		if id == large {
			body = string(payload)
		}
		r.must(l.Send(t.Context(), r.event(id, body), id))
	}
	r.must(l.Flush())
	for i, tag := range r.settleAll(l, 3*chunkMessages) {
		if tag != i {
			t.Fatalf("acknowledgement %d is of message %d", i, tag)
		}
	}
	if first, second := r.nextAck(acks), r.nextAck(acks); first.Count != large || second.Seq != large+1 || second.Count != 0 {
		t.Errorf("PubAcks %+v and %+v, want one of %d messages, and one of the large one", first, second, large)
	}
}

// TestFastBatchBreaksInItsMidst: somebody else's message comes between two chunks. What
// was written before it is stored and counts as unknown, and nothing behind it is stored.
func TestFastBatchBreaksInItsMidst(t *testing.T) {
	r, l, _ := chunked(t)
	const before = 5 * (chunkMessages - 1) // one of each chunk stays for the next
	for id := range before + 2 {
		r.must(r.send(l, id))
	}
	r.awaitStored(before)
	_, err := r.js.Publish(t.Context(), "events.foreign", []byte("x"))
	r.must(err)
	r.burst(l, before+2, 3000, small)
	<-l.Failed()
	if err := l.Err(); !errors.Is(err, ErrChain) {
		t.Errorf("%v, want ErrChain", err)
	}
	if refusals := l.Drain(t.Context()); len(refusals) != 0 {
		t.Errorf("a broken chain is no row's fault: %v", refusals)
	}
	if c := l.Counts(); c.Inflight != 0 || c.Forgotten == 0 {
		t.Errorf("%d rows wait for a PubAck, %d are forgotten", c.Inflight, c.Forgotten)
	}
	if ds := l.Take(nil, jetstream.U); len(ds) != 0 || len(r.headers()) != before+1 {
		t.Errorf("%d rows count as stored, and the stream has %d messages, want %d", len(ds), len(r.headers()), before+1)
	}
	if suspect, _ := l.BatchFailed(); suspect != maxAtomic {
		t.Errorf("%d rows are to be sent one by one, want %d", suspect, maxAtomic)
	}
}

// TestDrainOfABatchThatGoesOn: a batch that will never end has no PubAck to wait for.
func TestDrainOfABatchThatGoesOn(t *testing.T) {
	r, l, _ := chunked(t)
	for id := range chunkMessages + 1 {
		r.must(r.send(l, id))
	}
	r.awaitStored(chunkMessages - 1)
	l.fail(errors.New("something else"))
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	l.Drain(ctx)
	if c := l.Counts(); ctx.Err() != nil || c.Inflight != 0 || c.Forgotten != chunkMessages+1 {
		t.Errorf("%d rows wait for a PubAck, %d are forgotten, want all: %v", c.Inflight, c.Forgotten, ctx.Err())
	}
}

// TestStoredIsTold: what a PubAck was for is told once, commit by commit, and an
// acknowledgement in between tells nothing.
func TestStoredIsTold(t *testing.T) {
	r, l, _ := chunked(t)
	told := make(chan []Stored, 100)
	l.cfg.OnStored = func(s []Stored) { told <- slices.Clone(s) }
	first, second := time.UnixMicro(1_700_000_000_000_001), time.UnixMicro(1_700_000_000_000_002)
	const n, m = 700, 300 // JetStream acknowledges each 500
	for id := range n + m {
		ev := r.event(id, `{}`)
		if ev.CommitTime = first; id >= n {
			ev.CommitTime = second
		}
		r.must(l.Send(t.Context(), ev, id))
	}
	polled := r.event(n+m, `{}`)
	polled.CommitTime = time.Time{}
	r.must(l.SendPolled(t.Context(), polled, n+m))
	r.awaitStored(2 * chunkMessages)
	r.must(l.Flush())
	r.settleAll(l, n+m+1)
	want := []Stored{{first.UnixMicro(), n, nil}, {second.UnixMicro(), m, nil}, {0, 1, nil}}
	if got := <-told; !slices.Equal(got, want) || len(told) > 0 {
		t.Errorf("told %v, and %d times more; want %v once", got, len(told), want)
	}
}

// TestNothingIsWrittenBehindAFailedWrite: a batch whose write has failed is not written again, also
// when the publisher drains already and the connection works again.
func TestNothingIsWrittenBehindAFailedWrite(t *testing.T) {
	for name, c := range map[string]struct{ rows, stored int }{
		"in its first chunk": {10, 0},
		"in its last chunk":  {chunkMessages + 10, chunkMessages - 1},
	} {
		t.Run(name, func(t *testing.T) {
			r, l, _ := chunked(t)
			for id := range c.rows {
				r.must(r.send(l, id))
			}
			r.awaitStored(uint64(c.stored))
			closed, err := jetstream.Connect(t.Context(), jetstream.ConnConfig{URL: r.nats.URL()})
			r.must(err)
			closed.Close()
			l.fail(errDrained)
			l.sending.Lock()
			works := l.wire
			l.wire = wire{nc: closed}
			l.sending.Unlock()
			if err := l.Flush(); err == nil {
				t.Fatal("the write has not failed")
			}
			l.sending.Lock()
			l.wire = works
			l.sending.Unlock()
			ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
			defer cancel()
			l.Drain(ctx)
			if n := l.Counts(); ctx.Err() != nil || n.Inflight != 0 || n.Forgotten != c.rows {
				t.Errorf("%d rows wait for a PubAck, %d are forgotten, want all: %v", n.Inflight, n.Forgotten, ctx.Err())
			}
			r.must(r.nc.Flush())
			if n := len(r.headers()); n != c.stored {
				t.Errorf("%d messages are stored, want %d", n, c.stored)
			}
		})
	}
}
