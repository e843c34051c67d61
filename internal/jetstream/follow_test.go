package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
)

// following is a Follow under way.
type following struct {
	t    *testing.T
	stop context.CancelFunc
	done chan error

	mu      sync.Mutex
	got     []Received
	waiting []error
}

func follow(t *testing.T, s *Stream, o FollowOptions) *following {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &following{t: t, stop: cancel, done: make(chan error, 1)}
	o.Waiting = func(err error) {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.waiting = append(f.waiting, err)
	}
	go func() {
		f.done <- s.Follow(ctx, o, func(m Received) error {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.got = append(f.got, m)
			return nil
		})
	}()
	t.Cleanup(cancel)
	return f
}

func (f *following) sequences() (all []uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, m := range f.got {
		all = append(all, m.Seq)
	}
	return all
}

func (f *following) until(what string, holds func() bool) {
	f.t.Helper()
	for deadline := time.Now().Add(testenv.Patience); !holds(); time.Sleep(10 * time.Millisecond) {
		select {
		case err := <-f.done:
			f.t.Fatalf("it ended with %v before: %s", err, what)
		default:
		}
		if time.Now().After(deadline) {
			f.t.Fatalf("waited in vain: %s; it has %d messages and waited for %v", what, len(f.sequences()), f.waited())
		}
	}
}

func (f *following) waited() []error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]error(nil), f.waiting...)
}

// end stops it; it is to end well.
func (f *following) end() {
	f.t.Helper()
	f.stop()
	select {
	case err := <-f.done:
		if err != nil {
			f.t.Errorf("ended with %v", err)
		}
	case <-time.After(testenv.Patience):
		f.t.Fatal("does not end")
	}
}

// wantAll: every message from a sequence to another, each once, in order.
func (f *following) wantAll(from, to uint64) {
	f.t.Helper()
	got := f.sequences()
	if uint64(len(got)) != to-from+1 {
		f.t.Errorf("%d messages, want those from %d to %d", len(got), from, to)
	}
	for i, seq := range got {
		if seq != from+uint64(i) {
			f.t.Fatalf("message %d is followed by %d", from+uint64(i)-1, seq)
		}
	}
}

// store publishes until the message is acknowledged.
func store(t *testing.T, nc *nats.Conn, subject, id string) {
	t.Helper()
	for deadline := time.Now().Add(testenv.Patience); ; time.Sleep(20 * time.Millisecond) {
		_, err := nc.RequestMsg(&nats.Msg{Subject: subject, Header: nats.Header{nats.MsgIdHdr: {id}}}, time.Second)
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("publish %s: %v", id, err)
		}
	}
}

func lastSeq(t *testing.T, s *Stream) uint64 {
	t.Helper()
	var info *StreamInfo
	var err error
	for deadline := time.Now().Add(testenv.Patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if info, err = s.Info(t.Context()); err == nil {
			return info.LastSeq
		}
	}
	t.Fatal(err)
	return 0
}

// TestFollowOutlivesTheServer kills it while messages come, and while none has come yet:
// what is stored before a new consumer is there is not passed over.
func TestFollowOutlivesTheServer(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newRig(t, n)
	publisher := connect(t, ConnConfig{URL: n.URL()})
	store(t, publisher, "events.old", "old")
	f := follow(t, r.stream, FollowOptions{From: 2})
	f.until("it has a consumer", func() bool { return consumers(t, r.js) == 1 })
	r.must(n.Kill())
	f.until("it says that it waits", func() bool { return len(f.waited()) > 0 })
	r.must(n.Start(t.Context()))
	for i := range 300 {
		if i == 100 || i == 200 {
			r.must(n.Kill())
			r.must(n.Start(t.Context()))
		}
		store(t, publisher, "events.new", fmt.Sprint(i))
	}
	last := lastSeq(t, r.stream)
	f.until("it has all", func() bool { return uint64(len(f.sequences())) >= last-1 })
	f.end()
	f.wantAll(2, last)
	waited := f.waited()
	if !errors.Is(waited[0], nats.ErrDisconnected) || waited[len(waited)-1] != nil {
		t.Errorf("it waited for %v", waited)
	}
	if n := consumers(t, r.js); n != 0 {
		t.Errorf("%d consumers are left", n)
	}
}

func consumers(t *testing.T, js jetstream.JetStream) int {
	t.Helper()
	s, err := js.Stream(t.Context(), "EVENTS")
	if err != nil {
		t.Fatal(err)
	}
	return s.CachedInfo().State.Consumers
}

// TestFollowOutlivesTheLeader: the stream gets another one, and the server goes on which
// the consumer is.
func TestFollowOutlivesTheLeader(t *testing.T) {
	t.Parallel()
	c := testenv.NewNATSCluster(t, 3)
	nc := connect(t, ConnConfig{URL: c.URL()})
	js := testenv.JetStream(t, nc)
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	must(js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, Replicas: 3}))(t)
	s := must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	f := follow(t, s, FollowOptions{From: 1})
	for i := range 300 {
		switch i {
		case 100:
			must(nc.Request("$JS.API.STREAM.LEADER.STEPDOWN.EVENTS", nil, 5*time.Second))(t)
		case 200:
			home := homeOfConsumer(ctx, t, js)
			for _, node := range c.Nodes {
				if node.Server().Name() == home {
					must(0, node.Restart(ctx))(t)
				}
			}
		}
		store(t, nc, "events.new", fmt.Sprint(i))
	}
	last := lastSeq(t, s)
	f.until("it has all", func() bool { return uint64(len(f.sequences())) >= last })
	f.end()
	f.wantAll(1, last)
}

func homeOfConsumer(ctx context.Context, t *testing.T, js jetstream.JetStream) string {
	t.Helper()
	stream := must(js.Stream(ctx, "EVENTS"))(t)
	for info := range stream.ListConsumers(ctx).Info() {
		return info.Cluster.Leader
	}
	t.Fatal("there is no consumer")
	return ""
}

// TestFollowPassesNobodysStatus: a message that looks like word from the server is one.
func TestFollowPassesNobodysStatus(t *testing.T) {
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	for _, status := range []string{"404", "409", "100", "503"} {
		must(r.nc.RequestMsg(&nats.Msg{Subject: "events.a", Header: nats.Header{"Status": {status}}}, 5*time.Second))(t)
	}
	store(t, r.nc, "events.b", "b")
	f := follow(t, r.stream, FollowOptions{From: 1})
	f.until("it has all", func() bool { return len(f.sequences()) >= 5 })
	f.end()
	f.wantAll(1, 5)
}

// TestFollowTakesMoreThanOneRequest: of messages and of time, with the filters of two types.
func TestFollowTakesMoreThanOneRequest(t *testing.T) {
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	const n = 3*followMost + 7
	for i := range n {
		for _, subject := range []string{"events.order.placed", "events.order", "events.payment.late.x"} {
			must(0, r.nc.PublishMsg(&nats.Msg{Subject: subject, Header: nats.Header{nats.MsgIdHdr: {fmt.Sprint(subject, i)}}}))(t)
		}
	}
	f := follow(t, r.stream, FollowOptions{From: 1, Filters: []string{"events.order.placed", "events.payment.>"}})
	f.until("it has all", func() bool { return len(f.sequences()) >= 2*n })
	f.end()
	for i, m := range f.got {
		if want := uint64(i/2*3 + 1 + i%2*2); m.Seq != want || m.Subject == "events.order" {
			t.Fatalf("message %d is sequence %d of %s, want %d", i, m.Seq, m.Subject, want)
		}
	}
}

// TestFollowNoticesAGap: a message that the consumer has sent and that did not arrive is
// asked for again. Somebody else takes it here.
func TestFollowNoticesAGap(t *testing.T) {
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	f := follow(t, r.stream, FollowOptions{From: 1})
	f.until("it has a consumer", func() bool { return consumers(t, r.js) == 1 })
	taken := must(r.nc.SubscribeSync(r.nc.NewInbox()))(t)
	stream := must(r.js.Stream(t.Context(), "EVENTS"))(t)
	for name := range stream.ConsumerNames(t.Context()).Name() {
		must(0, r.nc.PublishRequest("$JS.API.CONSUMER.MSG.NEXT.EVENTS."+name, taken.Subject, []byte("1")))(t)
	}
	for i := range 5 {
		store(t, r.nc, "events.a", fmt.Sprint(i))
	}
	must(taken.NextMsg(testenv.Patience))(t)
	f.until("it has all", func() bool { return len(f.sequences()) >= 5 })
	f.end()
	f.wantAll(1, 5)
}

func TestFollowEndsWithTheErrorOfEach(t *testing.T) {
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	store(t, r.nc, "events.a", "a")
	full := errors.New("disk full")
	err := r.stream.Follow(t.Context(), FollowOptions{From: 1}, func(Received) error { return full })
	if err != full { //nolint:errorlint // as it is
		t.Errorf("ended with %v", err)
	}
	if n := consumers(t, r.js); n != 0 {
		t.Errorf("%d consumers are left", n)
	}
}

// TestFollowNoticesAnotherStream: it does not wait for sequences that a new stream will
// have in a year.
func TestFollowNoticesAnotherStream(t *testing.T) {
	for name, change := range map[string]struct {
		do   func(context.Context, *rig) error
		want error
	}{
		"deleted": {func(ctx context.Context, r *rig) error { return r.js.DeleteStream(ctx, "EVENTS") }, ErrStreamNotFound},
		"recreated": {func(ctx context.Context, r *rig) error {
			gone := r.js.DeleteStream(ctx, "EVENTS")
			_, err := r.js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
			for i := range 9 { // it has the sequences that the old one had
				store(r.t, r.nc, "events.a", fmt.Sprint(i))
			}
			return errors.Join(gone, err)
		}, ErrNotTheStream},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
			// The server removes the directory of an account without streams some time after the
			// last one's deletion, which makes a creation fail.
			_, err := r.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "OTHER", Subjects: []string{"other"}})
			r.must(err)
			for i := range 3 {
				store(t, r.nc, "events.a", fmt.Sprint(i))
			}
			f := follow(t, r.stream, FollowOptions{From: 1})
			f.until("it has all", func() bool { return len(f.sequences()) == 3 })
			r.must(change.do(t.Context(), r))
			select {
			case err := <-f.done:
				if !errors.Is(err, change.want) || hint.Of(err) == "" {
					t.Errorf("ended with %v (hint: %s), want %v", err, hint.Of(err), change.want)
				}
			case <-time.After(testenv.Patience):
				t.Fatal("it waits for ever")
			}
		})
	}
}

// TestFollowNoticesARolledBackStream: the server comes back with an older store.
func TestFollowNoticesARolledBackStream(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	r := newRig(t, n)
	store(t, r.nc, "events.a", "first")
	backup := t.TempDir() + "/store"
	r.must(n.Stop(t.Context()))
	r.must(n.SnapshotStore(backup))
	r.must(n.Start(t.Context()))
	for i := range 3 {
		store(t, r.nc, "events.b", fmt.Sprint(i))
	}
	f := follow(t, r.stream, FollowOptions{From: 1})
	f.until("it has all", func() bool { return len(f.sequences()) == 4 })
	r.must(n.Stop(t.Context()))
	r.must(n.RestoreStore(backup))
	r.must(n.Start(t.Context()))
	select {
	case err := <-f.done:
		wantError(t, err, "ends at sequence 1, and 4 was there already")
	case <-time.After(testenv.Patience):
		t.Fatal("it waits for ever")
	}
}

// readOnly are the permissions that `walpost tail` tells of.
const readOnly = `{
	publish { allow: [
		"$JS.API.STREAM.INFO.EVENTS"
		"$JS.API.CONSUMER.CREATE.EVENTS.>"
		"$JS.API.CONSUMER.MSG.NEXT.EVENTS.>"
		"$JS.API.CONSUMER.DELETE.EVENTS.>"
	] }
	subscribe { allow: [ "_WALPOST.a1.>" ] }
}`

func TestFollowNeedsThesePermissions(t *testing.T) {
	_, cfg := restricted(t, readOnly)
	createAs(t, "admin", cfg)
	admin := cfg
	admin.User, admin.InboxPrefix = "admin", ""
	nc := connect(t, admin)
	store(t, nc, "events.order.placed", "1")
	js := testenv.JetStream(t, nc)
	var sig signals
	sig.set(&cfg)
	s := must(NewStream(connect(t, cfg), StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	for _, filters := range [][]string{nil, {"events.order.>"}, {"events.order.>", "events.a"}} {
		from := must(s.SeqSince(t.Context(), time.Now().Add(-time.Hour)))(t)
		f := follow(t, s, FollowOptions{From: from, Filters: filters})
		f.until("it has the message", func() bool { return len(f.sequences()) == 1 })
		f.end()
	}
	select {
	case err := <-sig.errs:
		t.Errorf("permission error: %v", err)
	default:
	}
	if n := consumers(t, js); n != 0 {
		t.Errorf("%d consumers are left", n)
	}
}

// TestFollowSaysWhatIsNotPermitted, each by its subject, and at once.
func TestFollowSaysWhatIsNotPermitted(t *testing.T) {
	for _, subject := range []string{"$JS.API.STREAM.INFO.EVENTS", "$JS.API.CONSUMER.CREATE.EVENTS.>", "$JS.API.CONSUMER.MSG.NEXT.EVENTS.>"} {
		t.Run(subject, func(t *testing.T) {
			t.Parallel()
			_, cfg := restricted(t, strings.Replace(readOnly, `"`+subject+`"`, "", 1))
			createAs(t, "admin", cfg)
			s := must(NewStream(connect(t, cfg), StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			err := s.Follow(ctx, FollowOptions{From: 1, Waiting: func(err error) { t.Errorf("it waits: %v", err) }},
				func(Received) error { return nil })
			wantError(t, err, strings.TrimSuffix(subject, ">"), "Permissions Violation")
			if !strings.Contains(hint.Of(err), subject) {
				t.Errorf("hint %q", hint.Of(err))
			}
		})
	}
}

// TestFollowEndsWhileItsConsumerIsMade: the server makes it all the same, and it is deleted.
func TestFollowEndsWhileItsConsumerIsMade(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newRig(t, n)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.must(n.Pause())
	sent := r.stream.nc.Stats().OutMsgs
	ended := make(chan func(), 1)
	go func() {
		_, done, _ := r.stream.consumer(ctx, jetstream.ConsumerConfig{})
		ended <- done
	}()
	for r.stream.nc.Stats().OutMsgs == sent {
		time.Sleep(time.Millisecond)
	}
	cancel()
	time.Sleep(100 * time.Millisecond) // for a creation that is broken off
	r.must(n.Resume())
	if done := <-ended; done != nil {
		done()
	}
	if n := consumers(t, r.js); n != 0 {
		t.Errorf("%d consumers are left", n)
	}
}
