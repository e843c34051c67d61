package publish

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

type publisherRig struct {
	t      *testing.T
	nats   *testenv.NATS
	nc     *nats.Conn
	js     natsjs.JetStream
	stream *jetstream.Stream
	table  *outbox.Table
	cfg    PublisherConfig
}

func newPublisherRig(t *testing.T, n *testenv.NATS, change func(*natsjs.StreamConfig)) *publisherRig {
	t.Helper()
	return newPublisherRigOver(t, n, jetstream.ConnConfig{URL: n.URL()}, change)
}

func newPublisherRigOver(t *testing.T, n *testenv.NATS, conn jetstream.ConnConfig, change func(*natsjs.StreamConfig)) *publisherRig {
	t.Helper()
	r := &publisherRig{t: t, nats: n, table: &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical()}}
	var err error
	r.nc, err = jetstream.Connect(t.Context(), conn)
	r.must(err)
	t.Cleanup(r.nc.Close)
	r.js = testenv.JetStream(r.t, r.nc)
	cfg := natsjs.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}}
	if change != nil {
		change(&cfg)
	}
	_, err = r.js.CreateStream(t.Context(), cfg)
	r.must(err)
	template, err := NewTemplate("events.{event_type}")
	r.must(err)
	r.stream, err = jetstream.NewStream(r.nc, jetstream.StreamConfig{Name: "EVENTS", Pattern: template.Pattern()})
	r.must(err)
	envelope, err := NewEnvelope(EnvelopeConfig{Source: "src", Stream: "EVENTS"})
	r.must(err)
	subjects := NewSubjects(template)
	subjects.Cover([]string{"events.>"})
	r.cfg = PublisherConfig{
		Conn: r.nc, Stream: r.stream, Subjects: subjects, Envelope: envelope, Chained: true, Window: 1000, WindowBytes: 8 << 20,
		AckTimeout: time.Minute, // the machine may be busy with something else
	}
	return r
}

func (r *publisherRig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// publisher starts at the stream's end.
func (r *publisherRig) publisher() *Publisher {
	r.t.Helper()
	info, err := r.stream.Info(r.t.Context())
	r.must(err)
	r.cfg.Base, r.cfg.Position = info.LastSeq, outbox.Position{SystemID: "1", Timeline: 1}
	l, err := NewPublisher(r.t.Context(), r.cfg)
	r.must(err)
	r.t.Cleanup(l.Close)
	return l
}

func (r *publisherRig) event(id int, payload string) *outbox.Event {
	ev := &outbox.Event{Table: r.table, XID: 1, Commit: outbox.LSN(id), N: 1, CommitTime: time.Now()}
	ev.Values[outbox.ID] = fmt.Appendf(nil, "%d", id)
	ev.Values[outbox.EventType] = []byte("order.created")
	ev.Values[outbox.Payload] = []byte(payload)
	return ev
}

func (r *publisherRig) send(l *Publisher, id int) error {
	return l.Send(r.t.Context(), r.event(id, `{}`), id)
}

func indexes(ds []Delivery) (out []uint64) {
	for _, d := range ds {
		out = append(out, d.Index)
	}
	return out
}

// settleAll takes and settles until n were taken or the publisher has failed.
func (r *publisherRig) settleAll(l *Publisher, n int) (tags []int) {
	r.t.Helper()
	for len(tags) < n {
		ds := l.Take(nil, jetstream.U)
		for _, d := range ds {
			tags = append(tags, d.Tag.(int))
		}
		l.Release(indexes(ds))
		if len(ds) > 0 {
			continue
		}
		select {
		case <-l.Stored():
		case <-l.Failed():
			if len(l.Take(nil, 0)) == 0 && l.Counts().Unreleased == 0 {
				return tags
			}
			r.t.Fatalf("publisher failed: %v", l.Err())
		case <-time.After(testenv.Patience):
			r.t.Fatalf("%d of %d were stored", len(tags), n)
		}
	}
	return tags
}

func (r *publisherRig) ids() (ids []string) {
	r.t.Helper()
	info, err := r.stream.Info(r.t.Context())
	r.must(err)
	_, err = r.stream.ScanBackward(r.t.Context(), info.FirstSeq, info.LastSeq, jetstream.ScanOptions{Source: "src", Step: func(ms []jetstream.Message) (bool, error) {
		for _, m := range ms {
			ids = append(ids, m.ID.ID)
		}
		return true, nil
	}})
	r.must(err)
	return ids
}

func TestPublisherStoresInOrder(t *testing.T) {
	n := testenv.Size(t, jetstream.U+4000, 40_000) // more than U: places are used again
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	l := r.publisher()
	taken := make(chan []int)
	go func() { taken <- r.settleAll(l, n) }()
	for id := range n {
		r.must(r.send(l, id))
	}
	for i, tag := range <-taken {
		if tag != i {
			t.Fatalf("acknowledgement %d is of message %d", i, tag)
		}
	}
	ids := r.ids() // newest first
	if len(ids) != n {
		t.Fatalf("stored %d, want %d", len(ids), n)
	}
	for i, id := range ids {
		if want := fmt.Sprint(n - 1 - i); id != want {
			t.Fatalf("message %d from the tail has id %s, want %s", i, id, want)
		}
	}
	if got := l.LastSeq(); got != uint64(n) {
		t.Errorf("LastSeq %d, want %d", got, n)
	}
}

func TestPublisherStopsAtU(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	l := r.publisher()
	l.Reserve(384) // stored before, and unmarked
	for id := range jetstream.U - 384 {
		r.must(r.send(l, id))
	}
	full, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := l.Send(full, r.event(jetstream.U, `{}`), 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("message %d past an unmarked one: %v, want to wait", jetstream.U+1, err)
	}
	var ds []Delivery
	for len(ds) < jetstream.U-384 {
		<-l.Stored()
		ds = l.Take(ds, jetstream.U)
	}
	// All of the publisher's own are settled: the unmarked one before them still counts.
	l.Release(indexes(ds))
	still, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := l.Send(still, r.event(jetstream.U, `{}`), 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the publisher ran past U messages behind one of before: %v", err)
	}
	l.Reserve(0)
	r.must(r.send(l, jetstream.U))
	var oldest []Delivery
	for len(oldest) == 0 {
		<-l.Stored()
		oldest = l.Take(nil, 1)
	}
	// All but its oldest are settled: it still counts.
	ds = nil
	for id := range jetstream.U - 1 {
		r.must(r.send(l, jetstream.U+1+id))
	}
	for len(ds) < jetstream.U-1 {
		<-l.Stored()
		ds = l.Take(ds, jetstream.U)
	}
	l.Release(indexes(ds))
	again, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := l.Send(again, r.event(2*jetstream.U, `{}`), 0); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("the publisher ran past U: %v", err)
	}
	l.Release(indexes(oldest))
	r.must(r.send(l, 2*jetstream.U))
}

func TestPublisherWaitsForTheWindow(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newPublisherRig(t, n, nil)
	r.cfg.Window, r.cfg.WindowBytes = 10, 32<<10
	l := r.publisher()
	r.must(r.send(l, 100)) // the first goes alone
	r.settleAll(l, 1)
	r.must(n.Pause())
	for id := range 10 {
		r.must(r.send(l, id))
	}
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := l.Send(short, r.event(10, `{}`), 10); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("message 11 of a window of 10: %v", err)
	}
	r.must(n.Resume())
	r.must(r.send(l, 10))
	r.settleAll(l, 11)
	// One message may be larger than the byte window, alone.
	r.must(l.Send(t.Context(), r.event(11, `"`+strings.Repeat("x", 64<<10)+`"`), 11))
	r.settleAll(l, 1)
}

func TestPublisherStopsWhenItsChainIsBroken(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	l := r.publisher()
	r.must(r.send(l, 1))
	r.settleAll(l, 1)
	_, err := r.js.Publish(t.Context(), "events.foreign", []byte("x"))
	r.must(err)
	r.must(r.send(l, 2))
	<-l.Failed()
	if err := l.Err(); !errors.Is(err, ErrChain) {
		t.Fatalf("%v, want ErrChain", err)
	}
	if refusals := l.Drain(t.Context()); len(refusals) != 0 {
		t.Errorf("a broken chain is no row's fault: %v", refusals)
	}
	if err := r.send(l, 3); !errors.Is(err, ErrChain) {
		t.Errorf("a stopped publisher took a message: %v", err)
	}
	if ids := r.ids(); len(ids) != 1 {
		t.Errorf("stored %v, want only 1", ids)
	}
}

func TestPublisherKeepsTheRowsOwnFailures(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), func(c *natsjs.StreamConfig) { c.MaxMsgSize = 4096 })
	l := r.publisher()
	r.must(r.send(l, 1))
	r.must(l.Send(t.Context(), r.event(2, `"`+strings.Repeat("x", 8192)+`"`), 2))
	for id := 3; id < 10 && r.send(l, id) == nil; id++ {
	}
	refusals := l.Drain(t.Context())
	if len(refusals) != 1 || refusals[0].Tag != 2 || refusals[0].Failure.Class != outbox.RowSize {
		t.Fatalf("refused %v, want row 2 for its size", refusals)
	}
	if got := r.settleAll(l, 1); got[0] != 1 {
		t.Errorf("stored %v, want 1", got)
	}
	if ids := r.ids(); len(ids) != 1 || ids[0] != "1" {
		t.Errorf("the stream holds %v: something passed the refused row", ids)
	}
}

func TestPublisherLooksAtDuplicates(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	r.cfg.Chained = false // else the chain catches it before
	l := r.publisher()
	r.must(r.send(l, 1))
	r.must(r.send(l, 2))
	r.settleAll(l, 2)
	l.Close()

	again := r.publisher()
	r.must(r.send(again, 1))
	<-again.Failed()
	if err := again.Err(); !errors.Is(err, ErrDoubtful) {
		t.Fatalf("%v, want ErrDoubtful", err)
	}
	if refusals := again.Drain(t.Context()); len(refusals) != 0 {
		t.Fatalf("refused %v, but it is in the stream", refusals)
	}
	if got := again.Take(nil, jetstream.U); len(got) != 1 || got[0].Tag != 1 {
		t.Fatalf("took %v, want row 1 as stored", got)
	}

	s, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	r.must(s.DeleteMsg(t.Context(), 2))
	third := r.publisher()
	r.must(r.send(third, 2))
	<-third.Failed()
	refusals := third.Drain(t.Context())
	if len(refusals) != 1 || refusals[0].Failure.Class != outbox.RowDuplicate {
		t.Fatalf("refused %v: a duplicate of a deleted message was taken as stored", refusals)
	}
}

func TestPublisherStopsOnSilence(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newPublisherRig(t, n, nil)
	r.cfg.AckTimeout = 300 * time.Millisecond
	l := r.publisher()
	r.must(n.Pause())
	defer n.Resume() //nolint:errcheck
	r.must(r.send(l, 1))
	<-l.Failed()
	if err := l.Err(); !errors.Is(err, ErrAckTimeout) {
		t.Fatalf("%v, want ErrAckTimeout", err)
	}
}

func TestPublisherStopsWhenTheConnectionIsLost(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newPublisherRig(t, n, nil)
	l := r.publisher()
	r.must(r.send(l, 1))
	r.settleAll(l, 1)
	r.must(n.Kill())
	<-l.Failed()
	if err := l.Err(); !errors.Is(err, nats.ErrDisconnected) {
		t.Fatalf("%v, want ErrDisconnected", err)
	}
	if refusals := l.Drain(t.Context()); len(refusals) != 0 {
		t.Errorf("an outage is no row's fault: %v", refusals)
	}
}

// TestDrainEndsWithItsConnection: the client has reconnected before the drain looks. Replies to what was
// sent before do not come, and nothing waits for them.
func TestDrainEndsWithItsConnection(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	proxy := testenv.NewProxy(t, strings.TrimPrefix(n.URL(), "nats://"))
	r := newPublisherRigOver(t, n, jetstream.ConnConfig{URL: "nats://" + proxy.Addr()}, nil)
	p := r.publisher()
	r.must(r.send(p, 1))
	r.settleAll(p, 1)
	proxy.Pause()
	r.must(r.send(p, 2))
	r.must(p.Flush())
	proxy.Drop() // with the message
	proxy.Resume()
	<-p.Failed()
	for r.nc.Stats().Reconnects == 0 || !r.nc.IsConnected() {
		time.Sleep(10 * time.Millisecond)
	}
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	if refusals := p.Drain(ctx); len(refusals) != 0 || ctx.Err() != nil {
		t.Errorf("drained with %v, %v", refusals, ctx.Err())
	}
}

func TestScanPassesOverWhatIsNotItsOwn(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	r.cfg.Chained = false
	l := r.publisher()
	for id := range 10 {
		r.must(r.send(l, id))
		r.must(l.Flush())
		_, err := r.js.Publish(t.Context(), "events.foreign", []byte("x"))
		r.must(err)
	}
	r.settleAll(l, 10)
	s, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	r.must(s.DeleteMsg(t.Context(), 20))
	info, err := r.stream.Info(t.Context())
	r.must(err)
	var behind []uint64
	found, err := r.stream.ScanBackward(t.Context(), info.FirstSeq, info.LastSeq, jetstream.ScanOptions{
		Source:  "src",
		Phantom: func(p outbox.Position) bool { return p.Commit >= 8 },
		Step: func(ms []jetstream.Message) (bool, error) {
			for _, m := range ms {
				behind = append(behind, m.Behind)
			}
			return true, nil
		},
	})
	r.must(err)
	if found.Own != 8 || found.Phantoms != 2 || found.Foreign != 18 {
		t.Errorf("found %+v", found)
	}
	if found.Tail.ID.ID != "7" || found.Tail.Position.Commit != 7 {
		t.Errorf("the tail is %+v, want row 7", found.Tail)
	}
	for i, b := range behind {
		if b != uint64(i) {
			t.Fatalf("message %d from the tail says %d are behind it", i, b)
		}
	}
}

// TestRefusedRowLeavesThePosition: the WAL may bring a row again that was refused
// long ago. What is sent next does not go back to its position.
func TestRefusedRowLeavesThePosition(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	l := r.publisher()
	r.must(r.send(l, 10))
	refused := r.event(5, `{}`)
	refused.Values[outbox.EventType] = []byte("no subject")
	if err := l.Send(t.Context(), refused, 5); err == nil {
		t.Fatal("a row without a subject was sent")
	}
	r.must(l.SendPolled(t.Context(), r.event(11, `{}`), 11))
	r.settleAll(l, 2)
	s, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	m, err := s.GetMsg(t.Context(), 2)
	r.must(err)
	p, err := outbox.ParsePosition(m.Header.Get(jetstream.PositionHeader))
	r.must(err)
	if p.Commit != 10 {
		t.Errorf("the next message says %s, behind one at 10", p)
	}
}

// TestLateRowKeepsThePosition: a session may end before it has recorded that rows wait,
// and the next one brings them when the publisher is past them.
func TestLateRowKeepsThePosition(t *testing.T) {
	r := newPublisherRig(t, testenv.NewNATS(t, testenv.NATSOptions{}), nil)
	r.cfg.Base, r.cfg.Position = 0, outbox.Position{SystemID: "1", Timeline: 1, Commit: 10, N: 2, Passed: 3}
	l, err := NewPublisher(t.Context(), r.cfg)
	r.must(err)
	defer l.Close()
	r.must(r.send(l, 5))
	r.must(r.send(l, 11))
	r.settleAll(l, 2)
	s, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	for seq, want := range map[uint64]string{1: "1/1/0/A/2/0/0 poll 0/5/1", 2: "1/1/0/B/1/0/0  "} {
		m, err := s.GetMsg(t.Context(), seq)
		r.must(err)
		if got := m.Header.Get(jetstream.PositionHeader) + " " + m.Header.Get(jetstream.ViaHeader) + " " + m.Header.Get(jetstream.CommitHeader); got != want {
			t.Errorf("message %d: %q, want %q", seq, got, want)
		}
	}
	var back []jetstream.Message
	_, err = r.cfg.Stream.ScanBackward(t.Context(), 1, 2, jetstream.ScanOptions{Source: r.cfg.Envelope.Source(), Step: func(ms []jetstream.Message) (bool, error) {
		back = append(back, ms...)
		return true, nil
	}})
	r.must(err)
	if len(back) != 2 || !back[1].Polled || back[1].Row != (outbox.Position{SystemID: "1", Timeline: 1, Commit: 5, N: 1}) {
		t.Errorf("read back: %+v", back)
	}
	if l.Passed() != 5 {
		t.Errorf("rows up to %s may have been sent out of turn, want up to 5", l.Passed())
	}
}

// TestNothingIsWrittenAfterAFailure: a message that was sent and is not written when the publisher
// stops is forgotten at once. No one waits for its reply, and it does not come in the midst of
// the next session's messages.
func TestNothingIsWrittenAfterAFailure(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newPublisherRig(t, n, nil)
	l := r.publisher()
	r.must(r.send(l, 1))
	r.settleAll(l, 1)
	_, err := r.js.Publish(t.Context(), "events.foreign", []byte("x"))
	r.must(err)
	r.must(n.Pause())
	r.must(r.send(l, 2))
	r.must(l.Flush())
	l.sending.Lock()
	l.lingering = true // no timer has it written
	l.sending.Unlock()
	r.must(r.send(l, 3))
	r.must(n.Resume())
	<-l.Failed()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	l.Drain(ctx)
	if ctx.Err() != nil {
		t.Error("the drain waited for a message that was never written")
	}
	if c := l.Counts(); c.Inflight != 0 || c.Forgotten != 2 {
		t.Errorf("%+v, want 2 forgotten", c)
	}
	if ids := r.ids(); len(ids) != 1 {
		t.Errorf("stored %v, want only 1", ids)
	}
}

// TestTheFirstMessageGoesAlone: if it is refused, none is under way behind it.
func TestTheFirstMessageGoesAlone(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newPublisherRig(t, n, nil)
	l := r.publisher()
	r.must(n.Pause())
	r.must(r.send(l, 1))
	short, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := l.Send(short, r.event(2, `{}`), 2); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a second message before the first one's PubAck: %v", err)
	}
	r.must(n.Resume())
	r.settleAll(l, 1)
	r.must(n.Pause())
	for id := range 5 {
		r.must(r.send(l, 2+id))
	}
	r.must(n.Resume())
	r.settleAll(l, 5)
}

// TestDrainDoesNotWaitForAWrite: a drain whose time is over returns although a write stands
// in its way that the server does not read.
func TestDrainDoesNotWaitForAWrite(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newPublisherRig(t, n, nil)
	r.cfg.WindowBytes = 1 << 30
	l := r.publisher()
	r.must(r.send(l, 1))
	r.settleAll(l, 1)
	r.must(n.Pause())
	sent := make(chan error, 1)
	go func() {
		payload := `"` + strings.Repeat("x", 500<<10) + `"`
		for id := 2; ; id++ {
			if err := l.Send(t.Context(), r.event(id, payload), id); err != nil {
				sent <- err
				return
			}
		}
	}()
	for since := time.Now(); time.Since(since) < 300*time.Millisecond; time.Sleep(time.Millisecond) {
		if l.sending.TryLock() { // no write stands in the way for so long yet
			l.sending.Unlock()
			since = time.Now()
		}
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	const writeTimeout = 10 * time.Second // of a connection: see jetstream.Socket
	begun := time.Now()
	l.Drain(over)
	if took := time.Since(begun); took > writeTimeout/2 {
		t.Errorf("the drain took %s: it waited for the write, which may take %s", took, writeTimeout)
	}
	if err := <-sent; err == nil || !l.wire.empty() {
		t.Errorf("the sender ended with %v; written is all: %v", err, l.wire.empty())
	}
	r.must(n.Resume())
}
