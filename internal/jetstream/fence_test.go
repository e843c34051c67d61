package jetstream

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// TestFence: what was sent before on the same connection is in the answer, however long
// the server has had no time for it. Without the fence it asks a server that has not come
// to the messages yet.
func TestFence(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newRig(t, n)
	for round := range 5 {
		const many = 3000
		r.must(n.Pause())
		for i := range many {
			r.must(r.nc.PublishMsg(&nats.Msg{Subject: "events.x", Data: []byte(strings.Repeat("x", 500)), Header: nats.Header{
				nats.MsgIdHdr: {strconv.Itoa(round*many + i)},
			}}))
		}
		resumed := time.AfterFunc(100*time.Millisecond, func() { r.must(n.Resume()) })
		info, doubt, err := r.stream.Fence(t.Context(), false, 0)
		r.must(errors.Join(err, doubt))
		resumed.Stop()
		if want := uint64((round + 1) * many); info.LastSeq != want {
			t.Errorf("the stream ends with %d behind the fence, want %d", info.LastSeq, want)
		}
	}
}

// TestFenceWithoutPermission: where the relay may not ask, it waits until the stream is
// quiet, and says so. It does not ask again on the same connection.
func TestFenceWithoutPermission(t *testing.T) {
	n, cfg := restricted(t, `{ publish { allow: [ "$JS.API.>", "events.order.>" ] }, subscribe { allow: "_WALPOST.a1.>" } }`)
	createAs(t, "admin", cfg)
	var s *Stream
	denied := make(chan string, 10)
	cfg.OnError = func(err error) {
		if subject, publishing, ok := PermissionSubject(err); ok && publishing {
			s.Deny(subject)
			s.Deny("events.something.else")
			denied <- subject
		}
	}
	s = must(NewStream(connect(t, cfg), StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	writer := connect(t, ConnConfig{URL: n.URL(), User: "admin", PasswordFile: cfg.PasswordFile})
	for _, fresh := range []bool{true, false} {
		before := must(s.Info(t.Context()))(t).LastSeq
		const more = 20
		go func() { // as if a lost connection's messages came in
			for range more {
				time.Sleep(20 * time.Millisecond)
				_ = writer.Publish("events.order.placed", []byte("x"))
			}
		}()
		info, doubt, err := s.Fence(t.Context(), fresh, 0)
		if err != nil {
			t.Fatal(err)
		}
		if info.LastSeq != before+more {
			t.Errorf("the fence was passed at sequence %d, before %d", info.LastSeq, before+more)
		}
		wantError(t, doubt, "no permission to publish on events.walpost")
	}
	if got := receive(t, denied, "permission error"); got != "events.walpost" || len(denied) > 0 {
		t.Errorf("asked on %s and %d times more, want once on events.walpost", got, len(denied))
	}
}

// TestFenceBesideAWriter: a stream that is never quiet keeps nobody from beginning.
func TestFenceBesideAWriter(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
				_ = r.nc.Publish("events.foreign", []byte("x"))
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	_, doubt, err := r.stream.Fence(t.Context(), true, 0)
	r.must(err)
	wantError(t, doubt, "not quiet")
	// On a connection that it knows the answer is enough.
	_, doubt, err = r.stream.Fence(t.Context(), false, 0)
	r.must(errors.Join(err, doubt))
}

// TestFenceOfAnotherSubject: a stream that takes nothing of the relay's cannot be asked.
func TestFenceOfAnotherSubject(t *testing.T) {
	r := newRig(t, testenv.NewNATS(t, testenv.NATSOptions{}))
	s := must(NewStream(r.nc, StreamConfig{Name: "EVENTS", Pattern: "other.>"}))(t)
	_, doubt, err := s.Fence(t.Context(), false, 0)
	r.must(err)
	wantError(t, doubt, "listens on no subject")
}

func TestMeet(t *testing.T) {
	for _, c := range []struct{ a, b, want string }{
		{"events.>", "events.>", "events.walpost"},
		{"events.>", "events.*", "events.walpost"},
		{"events.>", "events.*.created", "events.walpost.created"},
		{">", "shop.*.>", "shop.walpost.walpost"},
		{"events.order.>", "events.>", "events.order.walpost"},
		{"*.order", "events.*", "events.order"},
		{"events.order", "events.order", "events.order"},
	} {
		for _, got := range []string{meet(c.a, c.b), meet(c.b, c.a)} {
			if got != c.want || !Covers([]string{c.a}, got) || !Covers([]string{c.b}, got) {
				t.Errorf("%s and %s meet in %s, want %s", c.a, c.b, got, c.want)
			}
		}
	}
}

// TestFenceOfALostConnection: what a connection has left on its way is stored before a
// fence on another one is passed, as long as it does not stop for 200 ms.
func TestFenceOfALostConnection(t *testing.T) {
	n := testenv.NewNATS(t, testenv.NATSOptions{})
	r := newRig(t, n)
	proxy := testenv.NewProxy(t, strings.TrimPrefix(n.URL(), "nats://"))
	lost, err := nats.Connect("nats://"+proxy.Addr(), nats.NoReconnect())
	r.must(err)
	const many = 1000
	proxy.Slow(20 * time.Millisecond) // for each 32 KiB
	for range many {
		r.must(lost.PublishMsg(&nats.Msg{Subject: "events.x", Data: []byte(strings.Repeat("x", 500))}))
	}
	lost.Close() // all is written, and most of it has not arrived
	info, doubt, err := r.stream.Fence(t.Context(), true, 0)
	r.must(errors.Join(err, doubt))
	if info.LastSeq == many {
		return
	}
	js, stored := testenv.JetStream(t, r.nc), []time.Time{}
	s, err := js.Stream(t.Context(), "EVENTS")
	r.must(err)
	for len(stored) < 2 {
		msg, err := s.GetMsg(t.Context(), info.LastSeq+uint64(len(stored)))
		if err == nil {
			stored = append(stored, msg.Time)
		}
	}
	if stopped := stored[1].Sub(stored[0]); stopped < 200*time.Millisecond {
		t.Errorf("the fence was passed at sequence %d, before %d, and nothing stopped for more than %s", info.LastSeq, many, stopped)
	}
}

// TestFenceAwaitsWhatWasAcknowledged: a replicated stream that seems to end before it is
// asked again, for a while; one without replicas is believed.
func TestFenceAwaitsWhatWasAcknowledged(t *testing.T) {
	t.Parallel()
	nc := connect(t, ConnConfig{URL: testenv.NewNATSCluster(t, 3).Nodes[0].URL()})
	js := testenv.JetStream(t, nc)
	for _, replicas := range []int{3, 1} {
		name := fmt.Sprintf("R%d", replicas)
		must(js.CreateStream(t.Context(), jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}, Replicas: replicas}))(t)
		s := must(NewStream(nc, StreamConfig{Name: name, Pattern: name + ".>"}))(t)
		must(js.Publish(t.Context(), name+".x", nil))(t)
		if replicas == 1 {
			if info, doubt, err := s.Fence(t.Context(), false, 2); err != nil || doubt != nil || info.LastSeq != 1 {
				t.Errorf("%s: sequence %d, doubt %v, %v", name, info.LastSeq, doubt, err)
			}
			continue
		}
		late := time.AfterFunc(time.Second, func() { _, _ = js.Publish(context.Background(), name+".x", nil) })
		if info, doubt, err := s.Fence(t.Context(), false, 2); err != nil || doubt != nil || info.LastSeq != 2 {
			t.Errorf("%s: sequence %d, doubt %v, %v", name, info.LastSeq, doubt, err)
		}
		late.Stop()
		if info, doubt, err := s.Fence(t.Context(), false, 3); err != nil || doubt == nil || info.LastSeq != 2 {
			t.Errorf("%s: sequence %d, doubt %v, %v; want a doubt", name, info.LastSeq, doubt, err)
		}
	}
}
