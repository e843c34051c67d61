package relay_test

import (
	"fmt"
	"slices"
	"syscall"
	"testing"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
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

// TestThawedRelayPublishesNothing: a relay is stopped in the middle of a backlog until another one, with another stream, has taken over.
// When it goes on, it stores none of the rows that it still had.
func TestThawedRelayPublishesNothing(t *testing.T) {
	t.Parallel()
	for _, mode := range testenv.Some(t, 1, relay.ModeAuto, relay.ModePoll) {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode = mode
			r.createStream(nil)
			r.elsewhere()()
			other := r.beside("_b").toOther()
			other.start().working(mode).halt()
			state := map[relay.Mode]string{relay.ModeAuto: "streaming", relay.ModePoll: "polling"}[mode]
			p := r.launch("WALPOST_MODE=" + string(mode)).awaitState(state)
			r.put(1, 10)
			r.pending(0)
			y := other.start()
			r.put(11, 30000)
			eventually(t, "the relay is in the middle", func() bool { return r.storedCount() > 1000 })
			r.must(p.signal(syscall.SIGSTOP))
			y.working(mode)
			r.pending(0)
			before, all := r.storedCount(), len(r.numbersIn("EVENTS", "OTHER"))
			if before == 30000 {
				t.Fatal("the relay was not in the middle")
			}
			r.must(p.signal(syscall.SIGCONT))
			p.awaitState("standby")
			if n := len(r.numbersIn("EVENTS", "OTHER")); n != all {
				t.Errorf("%d rows are stored that the other relay had stored and marked", n-all)
			}
			if got := slices.Compact(r.numbersIn("EVENTS", "OTHER")); !slices.Equal(got, span(1, 30000)) {
				t.Errorf("%d of 30000 rows are stored", len(got))
			}
		})
	}
}
