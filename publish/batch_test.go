package publish

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// eachBatching runs a test for a stream that allows batches, and each kind of them.
func eachBatching(t *testing.T, options testenv.NATSOptions, change func(*natsjs.StreamConfig), do func(t *testing.T, r *publisherRig)) {
	for _, kind := range []jetstream.Batching{jetstream.BatchFast, jetstream.BatchAtomic} {
		t.Run(string(kind), func(t *testing.T) {
			r := newPublisherRig(t, testenv.NewNATS(t, options), func(c *natsjs.StreamConfig) {
				c.AllowAtomicPublish, c.AllowBatchPublish = true, true
				if change != nil {
					change(c)
				}
			})
			r.cfg.Batching, r.cfg.Window = kind, 4096
			do(t, r)
		})
	}
}

// headers reads the stream from its start.
func (r *publisherRig) headers() (all []nats.Header) {
	r.t.Helper()
	info, err := r.stream.Info(r.t.Context())
	r.must(err)
	if info.Messages == 0 {
		return nil
	}
	consumer, err := r.js.OrderedConsumer(r.t.Context(), "EVENTS", natsjs.OrderedConsumerConfig{HeadersOnly: true})
	r.must(err)
	messages, err := consumer.Messages()
	r.must(err)
	defer messages.Stop()
	for range info.Messages {
		m, err := messages.Next(natsjs.NextMaxWait(testenv.Patience))
		r.must(err)
		all = append(all, m.Headers())
	}
	return all
}

// TestBatchesStoreInOrder: rows of transactions of every size, with the reader's pauses
// anywhere. In atomic batches a transaction of up to 1,000 rows is never cut.
func TestBatchesStoreInOrder(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		rows := testenv.Size(t, 8000, 20_000)
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		rng := rand.New(rand.NewPCG(seed, 0))
		var ends []int // of the transactions
		sizes := []int{1, 1, 1, 2, 7, 100, 400, 999, 1000, 1500}
		for end := 0; end < rows; {
			rng.Shuffle(len(sizes), func(i, j int) { sizes[i], sizes[j] = sizes[j], sizes[i] })
			for _, size := range sizes {
				end = min(rows, end+size)
				ends = append(ends, end)
			}
		}
		l := r.publisher()
		taken := make(chan []int)
		go func() { taken <- r.settleAll(l, rows) }()
		id := 0
		for _, end := range ends {
			for ; id < end; id++ {
				ev := r.event(id, `{}`)
				ev.Commit, ev.N = outbox.LSN(end), uint32(id)
				r.must(l.Send(t.Context(), ev, id))
				if rng.IntN(150) == 0 {
					r.must(l.Flush())
				}
			}
			l.EndTransaction()
			if rng.IntN(20) == 0 {
				r.must(l.Flush())
			}
		}
		r.must(l.Flush())
		for i, tag := range <-taken {
			if tag != i {
				t.Fatalf("acknowledgement %d is of message %d", i, tag)
			}
		}
		all := r.headers()
		if len(all) != rows {
			t.Fatalf("stored %d, want %d", len(all), rows)
		}
		batches := map[string]int{}
		for i, h := range all {
			if id, _ := outbox.ParseMessageID("src", h.Get(nats.MsgIdHdr)); id.ID != fmt.Sprint(i) {
				t.Fatalf("sequence %d holds row %s", i+1, id.ID)
			}
			if id := h.Get(batchIDHeader); id != "" {
				batches[id]++
			}
		}
		if r.cfg.Batching == jetstream.BatchFast {
			return
		}
		begin := 0
		for _, end := range ends {
			one := func(h nats.Header) bool { return h.Get(batchIDHeader) != all[begin].Get(batchIDHeader) }
			if size := end - begin; size > 1 && size <= maxAtomic && (all[begin].Get(batchIDHeader) == "" || slices.ContainsFunc(all[begin:end], one)) {
				t.Errorf("the transaction of the rows %d to %d is not in one batch", begin, end-1)
			}
			begin = end
		}
		if len(batches) < rows/maxAtomic/2 || len(batches) > len(ends) {
			t.Errorf("%d batches of %d transactions", len(batches), len(ends))
		}
	})
}

// TestBatchesLeaveNoHole: somebody else's messages move the sequence under what is on
// its way. Nothing is stored behind a message that was refused for it.
func TestBatchesLeaveNoHole(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		own := func() (n int) {
			for i, h := range r.headers() {
				id, ok := outbox.ParseMessageID("src", h.Get(nats.MsgIdHdr))
				if ok && id.ID != fmt.Sprint(n) {
					t.Fatalf("sequence %d holds row %s, want row %d", i+1, id.ID, n)
				} else if ok {
					n++
				}
			}
			return n
		}
		for range testenv.Size(t, 4, 8) {
			l, next := r.publisher(), own()
			var foreign sync.WaitGroup
			foreign.Go(func() {
				for l.Err() == nil && !l.Progress() {
					time.Sleep(100 * time.Microsecond)
				}
				for range 2 {
					_, _ = r.js.Publish(context.Background(), "events.foreign", []byte("x"))
				}
			})
			r.burst(l, next, next+100_000, small)
			<-l.Failed()
			l.Drain(t.Context())
			l.Close()
			foreign.Wait()
		}
		if own() == 0 {
			t.Error("no row is stored: the test shows nothing")
		}
	})
}

// TestBatchesTrickle: a row that comes alone goes alone.
func TestBatchesTrickle(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		l := r.publisher()
		for id := range 50 {
			r.must(r.send(l, id))
			l.EndTransaction()
			r.must(l.Flush())
			r.settleAll(l, 1)
		}
		for i, h := range r.headers() {
			if h.Get(batchIDHeader) != "" || h.Get(nats.ExpectedLastSeqHdr) != fmt.Sprint(i) {
				t.Fatalf("headers of row %d: %v", i, h)
			}
		}
	})
}

// TestBatchesLinger: a message goes without a Flush, too.
func TestBatchesLinger(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		l := r.publisher()
		for id := range 100 {
			r.must(r.send(l, id))
		}
		l.EndTransaction()
		r.settleAll(l, 100)
	})
}

// burst sends rows until the publisher stops.
func (r *publisherRig) burst(l *Publisher, from, to int, payload func(id int) string) {
	r.t.Helper()
	for id := from; id < to; id++ {
		if l.Send(r.t.Context(), r.event(id, payload(id)), id) != nil {
			return
		}
		if id%600 == 599 {
			l.EndTransaction()
		}
	}
	l.EndTransaction()
	_ = l.Flush()
}

func small(int) string { return `{}` }

// TestBatchesKeepTheRowsOwnFailures: a fast batch says which row it was, an atomic one
// does not, and rows that are then sent one by one do.
func TestBatchesKeepTheRowsOwnFailures(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, func(c *natsjs.StreamConfig) { c.MaxMsgSize = 4096 }, func(t *testing.T, r *publisherRig) {
		payload := func(id int) string {
			if id == 300 {
				return strings.Repeat("x", 8192)
			}
			return `{}`
		}
		l := r.publisher()
		r.burst(l, 0, 600, payload)
		<-l.Failed()
		refusals := l.Drain(t.Context())
		if suspect, refused := l.BatchFailed(); suspect == 0 || refused {
			t.Errorf("the publisher says %d, %v of the batch", suspect, refused)
		}
		if r.cfg.Batching == jetstream.BatchAtomic {
			if len(refusals) != 0 || len(r.headers()) != 0 {
				t.Fatalf("refused %v, %d stored", refusals, len(r.headers()))
			}
			r.cfg.OneByOne = maxAtomic
			l = r.publisher()
			r.burst(l, 0, 600, payload)
			<-l.Failed()
			refusals = l.Drain(t.Context())
		}
		if len(refusals) != 1 || refusals[0].Tag != 300 || refusals[0].Failure.Class != outbox.RowSize {
			t.Fatalf("refused %v, want row 300 for its size", refusals)
		}
		if n := len(r.headers()); n != 300 {
			t.Errorf("%d rows are stored: something passed the refused row", n)
		}
	})
}

// TestBatchesEndWhereASubjectIsDenied: the batch's last message never arrives, and so no
// PubAck.
func TestBatchesEndWhereASubjectIsDenied(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		l := r.publisher()
		l.sending.Lock()
		l.lingering = true // nothing is published
		l.sending.Unlock()
		for id := range 99 {
			r.must(r.send(l, id))
		}
		last := r.event(99, `{}`)
		last.Values[outbox.EventType] = []byte("order.denied")
		r.must(l.Send(t.Context(), last, 99))
		l.sending.Lock()
		l.mu.Lock() // as if they were under way
		l.unit = unit{n: 100, batch: true, state: unitComplete}
		l.mu.Unlock()
		l.stage.clear()
		l.sending.Unlock()
		l.Deny("events.order.denied")
		short, cancel := context.WithTimeout(t.Context(), testenv.Patience)
		defer cancel()
		if refusals := l.Drain(short); len(refusals) != 1 || short.Err() != nil {
			t.Errorf("%d rows are refused, want the last one: %v", len(refusals), short.Err())
		}
	})
}

// TestBatchesFlushWhatBecomesWhole: the reader may be held up between the end of a
// transaction and its next pause.
func TestBatchesFlushWhatBecomesWhole(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		l := r.publisher()
		r.must(r.send(l, 1))
		time.Sleep(2 * maxLinger)
		r.must(l.Flush()) // in the middle of the transaction
		l.EndTransaction()
		r.settleAll(l, 1)
	})
}

// TestBatchesStopWhenTheirChainIsBroken: a foreign message stops the batches behind
// it, and only what is in the stream counts as stored.
func TestBatchesStopWhenTheirChainIsBroken(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		l := r.publisher()
		r.burst(l, 0, 500, small)
		r.settleAll(l, 500)
		_, err := r.js.Publish(t.Context(), "events.foreign", []byte("x"))
		r.must(err)
		r.burst(l, 500, 3000, small)
		<-l.Failed()
		if err := l.Err(); !errors.Is(err, ErrChain) {
			t.Errorf("%v, want ErrChain", err)
		}
		if refusals := l.Drain(t.Context()); len(refusals) != 0 {
			t.Errorf("a broken chain is no row's fault: %v", refusals)
		}
		if ds := l.Take(nil, jetstream.U); len(ds) != 0 || len(r.headers()) != 501 {
			t.Errorf("%d rows count as stored, and the stream has %d messages", len(ds), len(r.headers()))
		}
	})
}

// TestBatchesDoNotBelieveDuplicates: JetStream leaves out of a fast batch what it takes
// for a duplicate, without a word. Rows whose messages were deleted come again.
func TestBatchesDoNotBelieveDuplicates(t *testing.T) {
	eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
		l := r.publisher()
		r.burst(l, 0, 200, small)
		r.settleAll(l, 200)
		l.Close()
		s, err := r.js.Stream(t.Context(), "EVENTS")
		r.must(err)
		deleted := []int{150, 151, 152, 199}
		for _, id := range deleted {
			r.must(s.DeleteMsg(t.Context(), uint64(id+1)))
		}
		for _, at := range []int{0, 1, 40, 99} { // in the batch
			r.cfg.OneByOne = 0
			l := r.publisher()
			for i := range 100 {
				id := 1000*(at+1) + i
				if slices.Contains([]int{at, at + 1, at + 2}, i) {
					id = deleted[i-at]
				}
				if l.Send(t.Context(), r.event(id, `{}`), id) != nil {
					break
				}
			}
			l.EndTransaction()
			_ = l.Flush()
			<-l.Failed()
			refusals := l.Drain(t.Context())
			for _, d := range l.Take(nil, jetstream.U) {
				if slices.Contains(deleted, d.Tag.(int)) {
					t.Fatalf("row %d counts as stored: its message was deleted", d.Tag)
				}
			}
			for _, x := range refusals {
				if !slices.Contains(deleted, x.Tag.(int)) || x.Failure.Class != outbox.RowDuplicate {
					t.Fatalf("refused %v", x)
				}
			}
			l.Close()
		}
		r.cfg.OneByOne = maxAtomic
		l = r.publisher()
		r.must(l.Send(t.Context(), r.event(150, `{}`), 150))
		l.EndTransaction()
		<-l.Failed()
		if refusals := l.Drain(t.Context()); len(refusals) != 1 || refusals[0].Failure.Class != outbox.RowDuplicate {
			t.Errorf("refused %v, want row 150 as a false duplicate", refusals)
		}
	})
}

// TestBatchesAcrossACrash: what the publisher says is stored is in the stream, and nothing
// is in it twice or out of order.
func TestBatchesAcrossACrash(t *testing.T) {
	t.Parallel()
	eachBatching(t, testenv.NATSOptions{Process: true}, nil, func(t *testing.T, r *publisherRig) {
		n := r.nats
		stored := map[int]bool{}
		next := 0
		for round := range 4 {
			r.cfg.OneByOne = 0
			eventuallyConnected(t, r)
			l := r.publisher()
			killed := make(chan struct{})
			go func() {
				defer close(killed)
				for l.Err() == nil && !l.Progress() {
					time.Sleep(time.Millisecond)
				}
				time.Sleep(time.Duration(5*round) * time.Millisecond)
				_ = n.Kill()
			}()
			r.burst(l, next, next+100_000, small)
			<-l.Failed()
			l.Drain(t.Context())
			for _, d := range l.Take(nil, 1<<20) {
				stored[d.Tag.(int)] = true
			}
			l.Close()
			<-killed
			r.must(n.Start(t.Context()))
			eventuallyConnected(t, r)
			next = len(r.headers())
		}
		for i, h := range r.headers() {
			if id, _ := outbox.ParseMessageID("src", h.Get(nats.MsgIdHdr)); id.ID != fmt.Sprint(i) {
				t.Fatalf("sequence %d holds row %s", i+1, id.ID)
			}
		}
		for id := range stored {
			if id >= next {
				t.Fatalf("row %d counts as stored, and the stream ends at row %d", id, next-1)
			}
		}
		if len(stored) == 0 {
			t.Error("nothing was stored")
		}
	})
}

func eventuallyConnected(t *testing.T, r *publisherRig) {
	t.Helper()
	for until := time.Now().Add(testenv.Patience); ; time.Sleep(10 * time.Millisecond) {
		if r.nc.IsConnected() {
			if _, err := r.stream.Info(t.Context()); err == nil {
				return
			}
		}
		if time.Now().After(until) {
			t.Fatal("waited in vain for the server")
		}
	}
}

// TestBatchMessageForAnotherStream: where the streams' subjects were changed under a publisher,
// another stream gets a later message of a batch. It refuses it, although no header says
// for which stream it is and its expected sequence happens to be the other's.
func TestBatchMessageForAnotherStream(t *testing.T) {
	for _, allowed := range []bool{true, false} {
		eachBatching(t, testenv.NATSOptions{}, nil, func(t *testing.T, r *publisherRig) {
			l := r.publisher()
			_, err := r.js.UpdateStream(t.Context(), natsjs.StreamConfig{Name: "EVENTS", Subjects: []string{"events.order.>"}, AllowAtomicPublish: true, AllowBatchPublish: true})
			r.must(err)
			other, err := r.js.CreateStream(t.Context(), natsjs.StreamConfig{Name: "OTHER", Subjects: []string{"events.other"}, AllowAtomicPublish: allowed, AllowBatchPublish: allowed})
			r.must(err)
			_, err = r.js.Publish(t.Context(), "events.other", nil)
			r.must(err)
			for id, eventType := range []string{"order.created", "other", "order.created"} {
				ev := r.event(id, `{}`)
				ev.Commit, ev.Values[outbox.EventType] = 1, []byte(eventType)
				r.must(l.Send(t.Context(), ev, id))
			}
			l.EndTransaction()
			r.must(l.Flush())
			<-l.Failed()
			l.Drain(t.Context())
			info, err := other.Info(t.Context())
			r.must(err)
			if info.State.Msgs != 1 {
				t.Errorf("the other stream holds %d messages of the publisher (%v)", info.State.Msgs-1, l.Err())
			}
		})
	}
}
