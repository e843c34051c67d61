package relay_test

import (
	"fmt"
	"testing"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestMessagesOfAnEarlierSession: JetStream is silent while a session ends, and has all its
// messages still before it when it goes on. The next session does not begin among them.
func TestMessagesOfAnEarlierSession(t *testing.T) {
	t.Parallel()
	n := testenv.NewNATS(t, testenv.NATSOptions{Process: true})
	r := newRigWith(t, testenv.SharedPostgres(t), n)
	r.cfg.Stream.Batching = jetstream.BatchSingle // many are under way
	x := r.start().streaming()
	const rounds, rows = 3, 1000
	for round := range rounds {
		first := round*rows + 1
		r.put(first, first) // the first of a session goes alone
		r.pending(0)
		r.must(n.Pause())
		r.put(first+1, first+rows-1)
		eventually(t, "messages are under way", func() bool { return x.metric("walpost_inflight_messages") == rows-1 })
		ended := x.metric("walpost_sessions_total")
		r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		eventually(t, "the session has ended", func() bool { return x.metric("walpost_sessions_total") > ended })
		eventually(t, "the next one asks where the stream ends", func() bool {
			return r.count(`SELECT count(*) FROM pg_replication_slots WHERE active AND slot_name = '`+r.cfg.Slot+`'`) == 1
		})
		r.must(n.Resume())
		r.pending(0)
	}
	r.storedIs(1, rounds*rows)
	for _, e := range x.logs.All() {
		if s := fmt.Sprint(e.ContextMap()["reason"]); s == "chain" {
			t.Errorf("a session began before the messages of the one before it were stored: %s %v", e.Message, e.ContextMap())
		}
	}
}
