package testenv

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

func TestNATSKeepsStreamOverCrashAndRestart(t *testing.T) {
	ctx := t.Context()
	n := NewNATS(t, NATSOptions{Process: true})
	js := client(t, n.URL())
	stream := createStream(t, js, 1)
	publish(t, js, 3)

	check(t, n.Kill())
	check(t, n.Start(ctx))
	expect(t, stream, 3)
	publish(t, js, 1)
	check(t, n.Restart(ctx))
	expect(t, stream, 4)
}

func TestNATSPausedProcessDoesNotAnswer(t *testing.T) {
	n := NewNATS(t, NATSOptions{Process: true})
	js := client(t, n.URL())
	createStream(t, js, 1)
	check(t, n.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := js.Publish(ctx, "events.x", nil); err == nil {
		t.Fatal("a paused server has answered")
	}
	check(t, n.Resume())
	publish(t, js, 1)
}

func TestNATSEmbeddedKeepsPortAndStream(t *testing.T) {
	n := NewNATS(t, NATSOptions{JetStream: "sync_interval: always", MaxPayload: 2048})
	js := client(t, n.URL())
	stream := createStream(t, js, 1)
	publish(t, js, 2)
	check(t, n.Restart(t.Context()))
	expect(t, stream, 2)
	if got := js.Conn().MaxPayload(); got != 2048 {
		t.Fatalf("max_payload is %d", got)
	}
	if err := n.Kill(); err == nil {
		t.Fatal("killed a server that is no process")
	}
}

func TestNATSStoreIsRestored(t *testing.T) {
	ctx := t.Context()
	n := NewNATS(t, NATSOptions{})
	js := client(t, n.URL())
	stream := createStream(t, js, 1)
	publish(t, js, 2)
	copied := filepath.Join(t.TempDir(), "store")
	if err := n.SnapshotStore(copied); err == nil {
		t.Fatal("copied the store of a running server")
	}
	check(t, n.Stop(ctx))
	check(t, n.SnapshotStore(copied))
	check(t, n.Start(ctx))
	publish(t, js, 2)
	check(t, n.Stop(ctx))
	check(t, n.RestoreStore(copied))
	check(t, n.Start(ctx))
	expect(t, stream, 2)
}

func TestNATSTakesAuthorization(t *testing.T) {
	n := NewNATS(t, NATSOptions{Config: `authorization { user: relay, password: secret }`})
	if nc, err := nats.Connect(n.URL()); err == nil {
		nc.Close()
		t.Fatal("connected without credentials")
	}
	client(t, n.URL(), nats.UserInfo("relay", "secret"))
}

func TestNATSClusterSurvivesANode(t *testing.T) {
	c := NewNATSCluster(t, 3)
	js := client(t, c.URL())
	stream := createStream(t, js, 3)
	publish(t, js, 2)
	check(t, c.Nodes[0].Stop(t.Context()))
	publish(t, js, 2)
	check(t, c.Nodes[0].Start(t.Context()))
	expect(t, stream, 4)
}

func TestProxyPausesCutsAndResumes(t *testing.T) {
	n := NewNATS(t, NATSOptions{})
	proxy := NewProxy(t, strings.TrimPrefix(n.URL(), "nats://"))
	js := client(t, "nats://"+proxy.Addr())
	stream := createStream(t, js, 1)
	publish(t, js, 1)

	proxy.Pause()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if _, err := js.Publish(ctx, "events.x", nil); err == nil {
		t.Fatal("a publish passed a paused proxy")
	}
	proxy.Resume()
	expect(t, stream, 2) // the bytes were only held up

	proxy.Cut()
	// The reset may come before Dial returns, or after.
	if conn, err := net.Dial("tcp", proxy.Addr()); err == nil {
		defer conn.Close()
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Fatal("a cut proxy has answered")
		}
	}
	proxy.Resume()
	publish(t, js, 1)
	proxy.Drop()
	publish(t, js, 1)
	expect(t, stream, 4)
}

func client(t *testing.T, url string, opts ...nats.Option) jetstream.JetStream {
	t.Helper()
	opts = append(opts, nats.MaxReconnects(-1), nats.ReconnectWait(10*time.Millisecond), nats.ReconnectJitter(0, 0),
		nats.ErrorHandler(func(*nats.Conn, *nats.Subscription, error) {})) // the default prints what is provoked here
	nc := ConnectNATS(t, url, opts...)
	js := JetStream(t, nc)
	return js
}

func createStream(t *testing.T, js jetstream.JetStream, replicas int) jetstream.Stream {
	t.Helper()
	s, err := js.CreateStream(t.Context(), jetstream.StreamConfig{
		Name: "EVENTS", Subjects: []string{"events.>"}, Replicas: replicas,
	})
	check(t, err)
	return s
}

// publish repeats what fails: the client may just be reconnecting. The message
// ids keep a repeated message from being stored twice.
func publish(t *testing.T, js jetstream.JetStream, n int) {
	t.Helper()
	for range n {
		id := nats.NewInbox()
		waitFor(t, "publish", func() bool {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := js.Publish(ctx, "events.x", nil, jetstream.WithMsgID(id))
			return err == nil
		})
	}
}

// expect waits for the number of messages, because a publish whose reply was
// given up may still be on its way.
func expect(t *testing.T, stream jetstream.Stream, want uint64) {
	t.Helper()
	waitFor(t, fmt.Sprintf("%d messages", want), func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		info, err := stream.Info(ctx)
		return err == nil && info.State.Msgs == want
	})
}
