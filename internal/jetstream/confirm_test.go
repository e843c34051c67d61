package jetstream

import (
	"context"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// replicated makes a stream with three replicas and returns it as its leader has it, and
// the other nodes.
func replicated(t *testing.T, c *testenv.NATSCluster) (s *Stream, others []*testenv.NATS) {
	t.Helper()
	js := testenv.JetStream(t, connect(t, ConnConfig{URL: c.URL()}))
	deadline := time.Now().Add(testenv.Patience)
	var stream jetstream.Stream
	for err := error(context.Canceled); err != nil; {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		stream, err = js.CreateStream(ctx, jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, Replicas: 3})
		cancel()
		if err != nil && time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	for _, node := range c.Nodes {
		nc := connect(t, ConnConfig{URL: node.URL()})
		if nc.ConnectedServerName() != stream.CachedInfo().Cluster.Leader {
			others = append(others, node)
			continue
		}
		s = must(NewStream(nc, StreamConfig{Name: "EVENTS", Pattern: "events.>"}))(t)
	}
	return s, others
}

// TestConfirmNeedsAMajority: a leader that hears from no replica may have been deposed.
func TestConfirmNeedsAMajority(t *testing.T) {
	t.Parallel()
	s, others := replicated(t, processes(t))
	store(t, s.nc, "events.a", "a")
	if info := must(s.Confirm(t.Context()))(t); info.LastSeq != 1 {
		t.Errorf("the stream ends at %d, want 1", info.LastSeq)
	}
	// A replica that the leader has never heard from looks as one that it hears.
	for all := false; !all; time.Sleep(100 * time.Millisecond) {
		all = true
		for _, p := range must(s.Info(t.Context()))(t).Replicas {
			all = all && p.Active > 0
		}
	}
	for _, node := range others {
		must(0, node.Pause())(t)
	}
	// What a node sent before it was stopped may reach the leader later: it has to be silent first.
	for heard := true; heard; {
		time.Sleep(100 * time.Millisecond)
		heard = false
		for _, p := range must(s.Info(t.Context()))(t).Replicas {
			heard = heard || p.Active < 2*time.Second
		}
	}
	_, err := s.Confirm(t.Context())
	for _, node := range others {
		must(0, node.Resume())(t)
	}
	wantError(t, err, "has heard from 0 of 2 other replicas")
	// The servers may elect leaders first, since they were silent for seconds.
	deadline := time.Now().Add(testenv.Patience)
	for _, err = s.Confirm(t.Context()); err != nil; _, err = s.Confirm(t.Context()) {
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

func processes(t *testing.T) *testenv.NATSCluster {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	c := must(testenv.StartNATSCluster(ctx, 3, testenv.NATSOptions{Process: true}))(t)
	t.Cleanup(func() { must(0, c.Close())(t) })
	return c
}
