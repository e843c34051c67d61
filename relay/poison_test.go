package relay_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
)

// TestPoisonRow: a row that cannot be sent holds its aggregate's later rows, others
// flow; after its eleventh attempt it is a dead letter, and the later rows follow.
// When the cause is gone it comes back, and is delivered.
func TestPoisonRow(t *testing.T) {
	t.Parallel()
	for _, policy := range []fallback.OnPoison{fallback.Hold, fallback.Skip} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
			r.cfg.Retry, r.cfg.OnPoison = table.Retry{Backoff: 30 * time.Millisecond, MaxAttempts: 10}, policy
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

			r.setSubjects("events.order.>", "events.payment.>")
			x.halt()
			x = r.start().streaming()
			r.retryAll()
			eventually(t, "the dead letter's event is stored", func() bool { return r.storedCount() == 600 })
			x.quiet("missed_rows")
		})
	}
}

// TestRetryBehindItsDeadLetter: a server that has forgotten the dead letter's confirmation
// brings the first insert again, and long after it the one of a retry that came
// while no relay ran. The event is stored once.
func TestRetryBehindItsDeadLetter(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) {
		c.Subjects, c.Duplicates = []string{"events.order.>"}, 100*time.Millisecond
	})
	r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1}
	x := r.start().streaming()
	r.keep()
	r.exec(putSQL, "payment.made", 1, 1)
	eventually(t, "the row is a dead letter", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 1 })
	r.put(2, 4)
	r.pending(0)
	x.halt()

	r.listenToAll()
	r.put(5, 10_000) // between the two inserts passes more than the window
	r.retryAll()
	r.rewind()
	x = r.start().streaming()
	r.pending(0)
	eventually(t, "the retried row is marked", func() bool { return r.unmarked() == 0 })
	r.passes(r.here())
	numbers := r.numbers()
	slices.Sort(numbers)
	if want := span(1, 10_000); !slices.Equal(numbers, want) {
		t.Errorf("stored %d messages %s, want each once", len(numbers), brief(numbers))
	}
	x.quiet("missed_rows")
}

// TestRetryKeepsItsPlace: what its aggregate commits after the retry comes after it.
func TestRetryKeepsItsPlace(t *testing.T) {
	t.Parallel()
	for _, policy := range []fallback.OnPoison{fallback.Hold, fallback.Skip} {
		t.Run(string(policy), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
			r.cfg.OnPoison, r.cfg.FallbackInterval = policy, time.Hour
			r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1}
			server := fmt.Sprintf("127.0.0.1:%d", r.pg.Port())
			proxy := testenv.NewProxy(t, server)
			r.cfg.PostgresURL = strings.Replace(r.url, server, proxy.Addr(), 1)
			x := r.start().streaming()
			r.exec(putSQL, "payment.made", 1, 5)
			eventually(t, "the rows are dead letters", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 5 })
			r.listenToAll()
			r.put(6, 10)
			r.pending(0)
			proxy.Pause() // all of it comes at once
			r.retryAll()
			r.put(11, 500)
			proxy.Resume()
			eventually(t, "all are marked", func() bool { return r.unmarked() == 0 })
			numbers := r.numbers()
			if policy == fallback.Skip { // there a failed row has no place to keep
				slices.Sort(numbers)
				if !slices.Equal(numbers, span(1, 500)) {
					t.Errorf("stored %s, want each once", brief(numbers))
				}
				return
			}
			if want := span(6, 10, 1, 5, 11, 500); !slices.Equal(numbers, want) {
				t.Errorf("stored %s, want %s", brief(numbers), brief(want))
			}
			x.quiet("missed_rows")
		})
	}
}

// TestDeadLetterIsNotSentByTheWAL: a server that has forgotten the confirmation of
// a dead letter brings the row again. It is a dead letter, and no row.
func TestDeadLetterIsNotSentByTheWAL(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
	r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1}
	x := r.start().streaming()
	r.put(1, 3)
	r.pending(0)
	r.keep()
	r.exec(putSQL, "payment.made", 4, 4) // the last one of all
	eventually(t, "the row is a dead letter", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 1 })
	x.halt()
	r.listenToAll()
	r.rewind()
	x = r.start().streaming()
	r.put(5, 6)
	r.pending(0)
	r.passes(r.here())
	r.storedIs(1, 3, 5, 6)
	r.retryAll()
	eventually(t, "the retried row is marked", func() bool { return r.unmarked() == 0 })
	r.storedIs(1, 3, 5, 6, 4, 4)
	x.quiet("missed_rows")
}

// listenToAll has the stream take every event.
func (r *rig) listenToAll() { r.t.Helper(); r.setSubjects("events.>") }

// retryAll takes all dead letters back.
func (r *rig) retryAll() {
	r.t.Helper()
	dlq, err := deadletter.Open(r.t.Context(), deadletter.Config{Config: table.Config{URL: r.url}, Outboxes: r.cfg.Outboxes})
	r.must(err)
	defer dlq.Close()
	r.must(dlq.Retry(r.t.Context(), deadletter.Filter{}, false, func(o deadletter.Outcome) { r.must(o.Err) }))
}

// TestEachDeadLetterIsInTheLog: of rows that become dead letters together the log names some, and counts the others.
func TestEachDeadLetterIsInTheLog(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
	r.cfg.Retry, r.cfg.OnPoison = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1}, fallback.Skip
	x := r.start().streaming()
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', i, 'payment.made', '{}' FROM generate_series(1, 50) i`)
	eventually(t, "the rows are dead letters", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 50 })
	x.halt()
	var all int64
	for _, e := range x.logs.All() {
		left, _ := e.ContextMap()["left_out"].(int64)
		switch {
		case strings.HasPrefix(e.Message, "a row has become a dead letter"):
			all += 1 + left
		case e.ContextMap()["kind"] == "dead_letter":
			all += left
		}
	}
	if all != 50 {
		t.Errorf("the log names and counts %d dead letters, want 50", all)
	}
}

// TestLargeDeadLettersLetOthersPass: while many large rows become dead letters, which is a copy of each, other rows are delivered
// and marked.
func TestLargeDeadLettersLetOthersPass(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
	r.cfg.Retry = table.Retry{Backoff: 10 * time.Millisecond, MaxAttempts: 1}
	r.start().streaming()
	const large = 800
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 1000 + n, 'payment.made', jsonb_build_object('n', n, 'text', (SELECT string_agg(md5(concat(n, i)), '') FROM generate_series(1, 3000) i))
		FROM generate_series(1, $1) n`, large)
	dead := func() int { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) }
	eventually(t, "the first one is a dead letter", func() bool { return dead() > 0 })
	r.exec(putSQL, "order.placed", 1, 1)
	eventually(t, "another row is marked", func() bool {
		return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`) == 1
	})
	if n := dead(); n > large/6 {
		t.Errorf("%d of %d were dead letters before another row was marked", n, large)
	}
	eventually(t, "all are", func() bool { return dead() == large })
}
