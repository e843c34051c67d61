package relay_test

import (
	"context"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// TestDeposedLeaderHasLostNothing: a start misses a message that was marked, and the stream's leader no longer
// hears from its replicas. It may have been deposed, so the start gives no verdict and begins again.
func TestDeposedLeaderHasLostNothing(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testenv.Patience)
	defer cancel()
	cluster, err := testenv.StartNATSCluster(ctx, 3, testenv.NATSOptions{Process: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cluster.Close() })
	r := newRigWith(t, testenv.SharedPostgres(t), cluster.Nodes[0])
	followers := r.replicate(cluster)
	x := r.start().streaming()
	r.put(1, 10)
	r.pending(0)
	r.passes(r.here())
	x.halt()
	r.loseMessages(5)

	x = r.start()
	var walsender int
	eventually(t, "a walsender has answered START_REPLICATION", func() bool {
		walsender = r.count(`SELECT coalesce(max(active_pid), 0) FROM pg_replication_slots JOIN pg_stat_replication ON pid = active_pid
			WHERE slot_name = $1 AND sent_lsn IS NOT NULL`, r.cfg.Slot)
		return walsender != 0
	})
	r.must(syscall.Kill(walsender, syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(walsender, syscall.SIGCONT) })
	r.exec(`SELECT pg_logical_emit_message(true, 'x', 'x')`)
	eventually(t, "the start misses a message", func() bool { return strings.Contains(x.Status().Step, "inserted as processed") })
	for _, node := range followers {
		r.must(node.Pause())
	}
	resume := func() {
		for _, node := range followers {
			r.must(node.Resume())
		}
	}
	t.Cleanup(resume)
	s, err := r.js().Stream(t.Context(), "EVENTS")
	r.must(err)
	eventually(t, "the leader hears nothing", func() bool {
		info, err := s.Info(t.Context())
		return err == nil && !slices.ContainsFunc(info.Cluster.Replicas, func(p *jetstream.PeerInfo) bool { return p.Active < time.Second })
	})
	r.must(syscall.Kill(walsender, syscall.SIGCONT))
	eventually(t, "the start begins again", func() bool {
		return x.logged("session ended, the next one begins with the read-back").Len() > 0 || x.alarm("events_lost") != nil
	})
	x.quiet("events_lost")
	if n := r.unmarked(); n != 0 {
		t.Errorf("%d rows are pending again", n)
	}
	resume()
	x.alarmed("events_lost")
	eventually(t, "the row is stored again", func() bool { return r.storedCount() == 10 })
	r.pending(0)
	r.storedIs(1, 4, 6, 10, 5, 5)
}

// replicate makes the stream with a replica on every node. The rig's node is the leader's then; the others
// are returned.
func (r *rig) replicate(cluster *testenv.NATSCluster) (followers []*testenv.NATS) {
	r.t.Helper()
	leader := ""
	eventually(r.t, "the stream is there", func() bool {
		ctx, cancel := context.WithTimeout(r.t.Context(), 5*time.Second)
		defer cancel()
		s, err := r.js().CreateStream(ctx, jetstream.StreamConfig{
			Name: "EVENTS", Subjects: []string{"events.>"}, Replicas: 3, Discard: jetstream.DiscardNew, AllowDirect: true,
			AllowBatchPublish: true, AllowAtomicPublish: true, Duplicates: 100 * time.Millisecond,
		})
		if err == nil {
			leader = s.CachedInfo().Cluster.Leader
		}
		return err == nil && leader != ""
	})
	for _, node := range cluster.Nodes {
		r.nats = node
		nc := r.js().Conn()
		if nc.ConnectedServerName() != leader {
			followers = append(followers, node)
			continue
		}
		r.cfg.NATS.URL = node.URL()
	}
	for _, node := range cluster.Nodes {
		if node.URL() == r.cfg.NATS.URL {
			r.nats = node
		}
	}
	return followers
}
