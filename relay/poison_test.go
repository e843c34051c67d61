package relay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// TestPoisonRow: a row that cannot be sent holds its aggregate's later rows, others
// flow; after its eleventh attempt it is a dead letter, and the later rows follow.
// When the cause is gone it comes back, and is delivered.
func TestPoisonRow(t *testing.T) {
	for _, policy := range []relay.OnPoison{relay.Hold, relay.Skip} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
			r.cfg.Retry, r.cfg.OnPoison = fallback.Retry{Backoff: 30 * time.Millisecond, MaxAttempts: 10}, policy
			x := r.start().streaming()
			lock := r.conn() // an open end: the aggregate is busy all the time
			busy, n := make(chan struct{}), 1
			go func() {
				defer close(busy)
				for ; n <= 400; n++ {
					eventType := "order.placed"
					if n == 50 {
						eventType = "payment.made"
					}
					if _, err := lock.Exec(t.Context(), putSQL, eventType, n, n); err != nil {
						t.Error(err)
						return
					}
					if n%2 == 0 { // another aggregate
						if _, err := lock.Exec(t.Context(), strings.Replace(putSQL, "1, $1", "2, $1", 1), "order.placed", 1000+n, 1000+n); err != nil {
							t.Error(err)
							return
						}
					}
					time.Sleep(5 * time.Millisecond)
				}
			}()
			eventually(t, "the row is a dead letter", func() bool {
				return r.query1(`SELECT count(*) FROM outbox_messages_dlq`) == "1"
			})
			dead := r.query1(`SELECT concat_ws('|', payload ->> 'n', event_type, attempts, split_part(last_error, ':', 1), original ->> 'payload') FROM outbox_messages_dlq`)
			if want := `50|payment.made|11|uncovered|{"n": 50}`; dead != want {
				t.Errorf("the dead letter says %s, want %s", dead, want)
			}
			<-busy
			r.pending(0)
			eventually(t, "nothing waits any more", func() bool {
				return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == "0" && x.metric("walpost_held_aggregates") == 0
			})
			var one, other []int
			for _, n := range r.numbers() {
				if n < 1000 {
					one = append(one, n)
				} else {
					other = append(other, n-1000)
				}
			}
			if got, want := brief(one), "[1-49 51-400]"; got != want {
				t.Errorf("of the aggregate are stored, in this order, %s, want %s", got, want)
			}
			if len(other) != 200 {
				t.Errorf("%d events of the other aggregate are stored, want 200", len(other))
			}
			if n := x.metric("outbox_failures_total", "class", "uncovered"); n < 11 {
				t.Errorf("outbox_failures_total is %v, want 11", n)
			}

			s, err := r.js().Stream(t.Context(), "EVENTS")
			r.must(err)
			cfg := s.CachedInfo().Config
			cfg.Subjects = append(cfg.Subjects, "events.payment.>")
			_, err = r.js().UpdateStream(t.Context(), cfg)
			r.must(err)
			x.halt()
			x = r.start().streaming()
			dlq, err := fallback.OpenDLQ(t.Context(), fallback.DLQConfig{Config: fallback.Config{URL: r.url}, Outboxes: r.cfg.Outboxes})
			r.must(err)
			defer dlq.Close()
			r.must(dlq.Retry(t.Context(), fallback.Filter{}, false, func(o fallback.Outcome) { r.must(o.Err) }))
			eventually(t, "the dead letter's event is stored", func() bool { return r.storedCount() == 600 })
			x.quiet("missed_rows")
		})
	}
}
