package relay_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// consumerConfig has the consumer's user of docs/OPERATIONS.md.
const consumerConfig = `
authorization {
	users = [
		{ user: anybody, password: secret }
		{ user: consumer, password: secret, permissions: {
			publish: { deny: ["events.>", "$JS.API.STREAM.>", "_WALPOST.>"] }, subscribe: { deny: ["_WALPOST.>"] } } }
	]
}
no_auth_user: anybody
`

// forgeAcks acknowledges as the consumer's user what the relay is about to send, before it is sent: it sees the reply subject of each
// message, and the next ones follow from it. It reports how many subjects it has learnt.
func (r *rig) forgeAcks(pause time.Duration) (learnt func() int) {
	r.t.Helper()
	password := filepath.Join(r.t.TempDir(), "password")
	r.must(os.WriteFile(password, []byte("secret"), 0o600))
	nc, err := jetstream.Connect(r.t.Context(), jetstream.ConnConfig{URL: r.nats.URL(), User: "consumer", PasswordFile: password})
	r.must(err)
	seen := make(chan string, 1000)
	_, err = nc.Subscribe("events.>", func(m *nats.Msg) {
		select {
		case seen <- m.Reply:
		default:
		}
	})
	r.must(err)
	r.must(nc.Flush())
	done := make(chan struct{})
	n := make(chan int)
	go func() {
		defer close(done)
		inbox, count := "", 0
		for r.t.Context().Err() == nil {
			select {
			case reply := <-seen:
				inbox, count = reply[:strings.LastIndex(reply, ".")+1], count+1
			case n <- count:
			case <-time.After(pause):
			}
			for index := uint64(3); index < 33 && inbox != ""; index++ {
				_ = nc.Publish(inbox+strconv.FormatUint(index, 36), fmt.Appendf(nil, `{"stream":"EVENTS","seq":%d}`, index+1))
			}
		}
	}()
	r.t.Cleanup(func() { <-done; nc.Close() })
	return func() int { return <-n }
}

// TestForgedAcks: a consumer acknowledges messages that a full stream refuses. It may not publish where the relay's acknowledgements
// come back. Where they come back on _INBOX it may: then the session ends, and the rows are delivered.
func TestForgedAcks(t *testing.T) {
	t.Parallel()
	for _, prefix := range []string{"", "_INBOX"} {
		t.Run("inbox prefix "+prefix, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Config: consumerConfig}))
			r.cfg.Stream.Batching = jetstream.BatchSingle
			if prefix != "" {
				r.cfg.NATS.InboxPrefix = prefix
			}
			limit := func(messages int64) func(*natsjs.StreamConfig) {
				return func(c *natsjs.StreamConfig) { c.MaxMsgs, c.Discard = messages, natsjs.DiscardNew }
			}
			r.createStream(limit(3))
			x := r.start().streaming()
			pause := time.Millisecond
			if prefix == "" {
				pause *= 100 // each attempt is an error in the server's log
			}
			learnt := r.forgeAcks(pause)
			r.put(1, 3)
			r.pending(0)
			if n := learnt(); n != 3 {
				t.Fatalf("the consumer has seen %d reply subjects, want 3: the test shows nothing", n)
			}
			r.put(4, 33)
			refused := func() bool {
				return slices.ContainsFunc(x.logs.All(), func(e observer.LoggedEntry) bool {
					return strings.Contains(fmt.Sprint(e.ContextMap()["error"]), "maximum messages exceeded")
				})
			}
			marked := func() string {
				return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`)
			}
			if prefix == "" {
				eventually(t, "a message is refused", refused)
				if got := marked(); got != "3" {
					t.Errorf("%s rows are marked, want 3", got)
				}
			} else {
				eventually(t, "all are acknowledged, or one is refused", func() bool { return marked() == "33" || refused() })
			}
			s, err := r.js().Stream(t.Context(), "EVENTS")
			r.must(err)
			cfg := s.CachedInfo().Config
			limit(-1)(&cfg)
			_, err = r.js().UpdateStream(t.Context(), cfg)
			r.must(err)
			eventually(t, "all rows are stored", func() bool { return r.storedCount() == 33 })
			r.pending(0)
			r.storedIs(1, 33)
		})
	}
}
