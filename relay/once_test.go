package relay_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// editStream changes the stream's configuration.
func (r *rig) editStream(change func(*jetstream.StreamConfig)) {
	r.t.Helper()
	s, err := r.js().Stream(r.t.Context(), "EVENTS")
	r.must(err)
	cfg := s.CachedInfo().Config
	change(&cfg)
	_, err = r.js().UpdateStream(r.t.Context(), cfg)
	r.must(err)
}

// runOnce runs a relay that ends by itself, and returns its last line.
func (r *rig) runOnce() (x *running, last map[string]any) {
	r.t.Helper()
	r.cfg.Once = true
	x = r.start()
	x.ends()
	if x.err != nil {
		r.t.Fatalf("the relay ended with %v", x.err)
	}
	all := x.logs.All()
	end := all[len(all)-1]
	if end.Message != "delivered what was pending" {
		r.t.Fatalf("the last line is %q", end.Message)
	}
	return x, end.ContextMap()
}

// onceSays runs a relay once, which has to say that in its last line.
func (r *rig) onceSays(delivered, parked, held, delayed int64) *running {
	r.t.Helper()
	x, last := r.runOnce()
	got := fmt.Sprint(last["delivered"], last["parked"], last["held"], last["delayed"])
	if want := fmt.Sprint(delivered, parked, held, delayed); got != want {
		r.t.Errorf("delivered, parked, held, delayed: %s, want %s", got, want)
	}
	if _, hinted := last["hint"]; hinted != (r.cfg.Mode != relay.ModePoll) {
		r.t.Errorf("a hint about the slot: %v", hinted)
	}
	return x
}

// TestOnce: a relay that runs once delivers what is pending, tries what may be tried, and says what waits.
func TestOnce(t *testing.T) {
	t.Parallel()
	type way struct {
		mark outbox.Mark
		mode relay.Mode
	}
	for _, w := range testenv.Some(t, 3, way{outbox.MarkUpdate, relay.ModeStream}, way{outbox.MarkDelete, relay.ModePoll},
		way{outbox.MarkJournal, relay.ModeStream}, way{outbox.MarkUpdate, relay.ModePoll},
		way{outbox.MarkDelete, relay.ModeStream}, way{outbox.MarkJournal, relay.ModePoll}) {
		mark, mode := w.mark, w.mode
		t.Run(string(mark)+" "+string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			switch {
			case mark == outbox.MarkJournal && !marksInJournal:
				r.journal()
			case mark == outbox.MarkDelete:
				r.cfg.Outboxes[0].Mark = mark
			}
			r.cfg.Mode = mode
			r.cfg.Retry = table.Retry{Backoff: time.Hour, MaxAttempts: 10} // the test says when a row is due again
			r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
			r.put(1, 1200)
			poison := strings.Replace(putSQL, "1, $1", "2, $1", 1)
			r.exec(poison, "payment.made", 9001, 9001)
			r.exec(poison, "order.placed", 9002, 9003)
			r.exec(set{"available_at": `now() + interval '1 hour'`, "aggregate_id": "3"}.insert("outbox_messages", 9004, canonicalRow))
			r.onceSays(1200, 1, 2, 1).quiet("missed_rows")
			r.storedIs(1, 1200)
			r.onceSays(0, 1, 2, 1)
			r.put(1201, 1300)
			r.onceSays(100, 1, 2, 1)
			r.storedIs(1, 1300)

			// What has fallen due between two runs, and a retry that fails again.
			r.exec(`UPDATE outbox_messages SET available_at = now() - interval '1 second' WHERE (payload ->> 'n')::int IN (9001, 9004)`)
			r.onceSays(1, 1, 2, 0)
			r.storedIs(1, 1300, 9004, 9004)
			if n := r.query1(`SELECT attempts FROM outbox_messages WHERE payload ->> 'n' = '9001'`); n != "2" {
				t.Errorf("the failed row was tried %s times, want 2", n)
			}

			// A retry that goes well takes the held rows along.
			r.editStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.>"} })
			r.exec(`UPDATE outbox_messages SET available_at = now() - interval '1 second' WHERE payload ->> 'n' = '9001'`)
			r.onceSays(3, 0, 0, 0)
			r.storedIs(1, 1300, 9004, 9004, 9001, 9003)
			if mark == outbox.MarkJournal {
				if behind := r.query1(`SELECT (SELECT max(id) FROM public.outbox_messages) - ` + testenv.Settled + ` FROM public.outbox_known`); behind != "0" {
					t.Errorf("the journal's progress is %s ids behind", behind)
				}
			}
		})
	}
}

// TestOnceFromTheTable: rows that the WAL does not bring are delivered before the relay ends.
func TestOnceFromTheTable(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.runOnce()
	r.exec(`ALTER PUBLICATION walpost SET (publish = 'truncate')`)
	r.put(1, 500)
	r.exec(`ALTER PUBLICATION walpost SET (publish = 'insert')`)
	x, last := r.runOnce()
	r.storedIs(1, 500)
	x.quiet("missed_rows") // the outbox joins
	if last["delivered"] != int64(500) {
		t.Errorf("delivered %v", last["delivered"])
	}
}

// TestOnceUnderLoad: it ends although rows keep coming, and a transaction stays open; what was committed before
// is delivered.
func TestOnceUnderLoad(t *testing.T) {
	t.Parallel()
	for _, mode := range []relay.Mode{relay.ModeStream, relay.ModePoll} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Mode = mode
			r.runOnce() // so that a slot is there: to make one waits for open transactions
			open := r.conn()
			r.must(run(t.Context(), open, `BEGIN`))
			_, err := open.Exec(t.Context(), putSQL, "order.placed", 1_000_000, 1_000_000)
			r.must(err)
			ctx, stop := context.WithCancel(t.Context())
			done := make(chan struct{})
			go func() {
				defer close(done)
				conn := r.conn()
				for n := 1; ctx.Err() == nil; n++ {
					time.Sleep(2 * time.Millisecond)
					if _, err := conn.Exec(t.Context(), putSQL, "order.placed", n, n); err != nil {
						t.Error(err)
						return
					}
				}
			}()
			for range 3 {
				eventually(t, "rows are pending", func() bool {
					return r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) > 100
				})
				newest := r.query1(`SELECT max((payload ->> 'n')::int) FROM outbox_messages`)
				r.runOnce()
				if n := r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND (payload ->> 'n')::int <= $1::text::int`, newest); n != "0" {
					t.Errorf("%s rows that were committed before the start are pending", n)
				}
			}
			stop()
			<-done
			r.must(run(t.Context(), open, `COMMIT`))
			r.runOnce()
			r.pending(0)
			r.storedSet(1, r.count(`SELECT max((payload ->> 'n')::int) FROM outbox_messages WHERE (payload ->> 'n')::int < 1000000`), 1_000_000, 1_000_000)
		})
	}
}

// TestOnceCannot: it fails where it cannot deliver, and loses nothing.
func TestOnceCannot(t *testing.T) {
	defer relay.SetOncePatience(2 * time.Second)()
	fails := func(x *running, text string) {
		t.Helper()
		x.ends()
		if x.err == nil || !strings.Contains(x.err.Error(), text) {
			t.Errorf("the relay ended with %v, want %q", x.err, text)
		}
	}
	r := newRig(t, testenv.SharedPostgres(t))
	r.put(1, 10)

	// Another relay is at work.
	active := r.start().streaming()
	r.cfg.Once = true
	x := r.start()
	fails(x, "a relay holds the lock of this slot: process ")
	if hint.Of(x.err) == "" {
		t.Error("no hint")
	}
	active.halt()
	r.storedIs(1, 10)

	// The stream is full.
	r.put(11, 30)
	r.editStream(func(c *jetstream.StreamConfig) { c.MaxMsgs, c.Discard = 15, jetstream.DiscardNew })
	x = r.start()
	fails(x, "nothing could be delivered for 2s: ")
	r.editStream(func(c *jetstream.StreamConfig) { c.MaxMsgs = -1 })
	r.onceSays(15, 0, 0, 0)
	r.storedIs(1, 30)

	// NATS is away, at the start and later.
	r.put(31, 40)
	r.must(r.nats.Kill())
	fails(r.start(), "nothing could be delivered for 2s: ")
	r.must(r.nats.Start(t.Context()))
	lock := r.conn()
	r.must(run(t.Context(), lock, `BEGIN`))
	r.must(run(t.Context(), lock, `SELECT FROM outbox_messages WHERE processed_at IS NULL LIMIT 1 FOR UPDATE`))
	x = r.start().streaming() // and waits for the locked row
	r.must(r.nats.Kill())
	fails(x, "nothing could be delivered for 2s: ")
	r.must(r.nats.Start(t.Context()))

	// It is interrupted.
	x = r.start().streaming()
	x.halt()
	fails(x, "it was interrupted")
	r.must(run(t.Context(), lock, `COMMIT`))
	r.runOnce()
	r.storedIs(1, 40)
}
