package consume_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

// TestStreamIsRolledBack: its server comes back with an older store, and the relay stores the rest again, in
// another order, beside new events. The sequences that the consumer knows have other messages then.
func TestStreamIsRolledBack(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		for _, more := range []int{2, 30} { // the stream ends before the old position, or behind it
			t.Run(fmt.Sprintf("running %t, %d more", running, more), func(t *testing.T) {
				t.Parallel()
				r := newRig(t)
				x := r.run(r.config(), effect)
				r.put(10, 3)
				r.effects(10)
				backup := t.TempDir() + "/store"
				r.must(r.nats.Stop(t.Context()))
				r.must(r.nats.SnapshotStore(backup))
				r.must(r.nats.Start(t.Context()))
				r.put(10, 3)
				r.effects(20)
				if !running {
					x.halt()
				}
				r.must(r.nats.Stop(t.Context()))
				r.must(r.nats.RestoreStore(backup))
				r.must(r.nats.Start(t.Context()))
				r.sent = 10
				r.put(10+more, 3)
				if !running {
					r.run(r.config(), effect)
				}
				r.effects(20 + more)
				r.logs("stream was restored or recreated")
				r.put(20, 3)
				r.effects(40 + more)
			})
		}
	}
}

// TestStreamIsRecreated with events that are there again and new ones.
func TestStreamIsRecreated(t *testing.T) {
	t.Parallel()
	for _, running := range []bool{true, false} {
		t.Run(fmt.Sprintf("running %t", running), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			// The server removes the directory of an account without streams some time after the last one's
			// deletion, which makes a creation fail.
			r.createStream(func(c *jetstream.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other"} })
			x := r.run(r.config(), effect)
			r.put(20, 3)
			r.effects(20)
			if !running {
				x.halt()
			}
			r.must(r.js.DeleteStream(t.Context(), "EVENTS"))
			r.createStream(nil)
			r.sent = 5
			r.put(30, 3)
			if !running {
				r.run(r.config(), effect)
			}
			r.effects(35)
			r.must(r.js.DeleteStream(t.Context(), "EVENTS"))
			time.Sleep(time.Second)
			r.createStream(nil)
			r.put(5, 3)
			r.effects(40)
		})
	}
}

// TestStreamIsReplacedWhilePartitionsChange: the new partitions begin at an offset of the old stream.
func TestStreamIsReplacedWhilePartitionsChange(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.createStream(func(c *jetstream.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other"} })
	x := r.run(r.config(), effect)
	r.put(40, 10)
	r.effects(40)
	x.halt()
	r.exec(`UPDATE consumer_definitions SET partitions = 4`)
	cfg := r.config()
	cfg.Partitions = 3
	r.exec(`UPDATE consumer_offsets SET last_processed_id = 1, anchor_sequence = 1 WHERE partition_key = 0`)
	r.must(r.js.DeleteStream(t.Context(), "EVENTS"))
	r.createStream(nil)
	r.put(30, 10)
	r.run(cfg, effect)
	r.effects(70)
}

// TestGap: the stream's limits deleted what was not read.
func TestGap(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	x := r.run(r.config(), effect)
	r.put(10, 3)
	r.effects(10)
	x.halt()
	r.createStream(func(c *jetstream.StreamConfig) { c.MaxMsgs = 5 })
	r.put(10, 3)
	x = r.run(r.config(), effect)
	x.fails(consume.ErrGap, "sequences 11 to 15")
	r.is(`SELECT count(*) FROM effects`, "10")
	cfg := r.config()
	cfg.SkipGaps = true
	x = r.run(cfg, effect)
	r.effects(15)
	if n := r.metric("consumer_gap_total"); n < 1 {
		t.Errorf("consumer_gap_total is %v", n)
	}
	x.halt()
	r.run(r.config(), effect) // it is behind the gap
	r.put(1, 1)
	r.effects(16)
}

// TestNoGap: limits delete what was handled, before and behind what other partitions have, and never what was not.
func TestNoGap(t *testing.T) {
	t.Parallel()
	for _, filters := range [][]string{nil, {"events.order.paid"}} {
		t.Run(strings.Join(filters, " "), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			r.createStream(func(c *jetstream.StreamConfig) { c.MaxMsgs = 20 })
			cfg := r.config()
			cfg.Filters, cfg.Metrics = filters, nil
			x := r.run(cfg, effect)
			n := 0
			for range 60 {
				r.store(fmt.Sprint(1000+n), "one", "order.paid") // all of one partition
				n++
				// The stream has 20: the consumer is never further behind than half of that.
				eventually(t, func() string { return "the consumer keeps up" }, func() bool {
					handled, err := strconv.Atoi(r.text(`SELECT count(*) FROM effects`))
					r.must(err)
					return n-handled < 10
				})
				if n%20 == 0 {
					x.halt()
					x = r.run(cfg, effect)
				}
			}
			r.effects(n)
			x.halt()
			if x.err != nil {
				t.Error(x.err)
			}
		})
	}
}

// TestSlowPartitionHoldsUpNoOther: it leaves the reader, catches up, and joins again.
func TestSlowPartitionHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	block := make(chan bool)
	cfg := r.config()
	cfg.Partitions = 2
	r.start(func(ctx context.Context) error {
		return consume.RunBatch(ctx, cfg, func(ctx context.Context, tx pgx.Tx, events []consume.Event) error {
			if events[0].Partition(2) == 0 {
				select {
				case <-block:
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			var b pgx.Batch
			for _, e := range events {
				b.Queue(insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
			}
			return tx.SendBatch(ctx, &b).Close()
		})
	})
	r.put(9000, 50)
	fast := 0
	for n := 1; n <= 9000; n++ {
		if e := (consume.Event{AggregateType: "order", AggregateID: fmt.Sprintf("a%d", n%50)}); e.Partition(2) != 0 {
			fast++
		}
	}
	r.waitFor(`SELECT count(*) FROM effects`, fmt.Sprint(fast))
	if lag := r.metric("consumer_lag_seconds"); lag <= 0 {
		t.Errorf("consumer_lag_seconds is %v", lag)
	}
	close(block)
	r.effects(9000)
	r.put(100, 50)
	r.effects(9100)
	eventually(t, func() string { return "no lag" }, func() bool { return r.metric("consumer_lag_seconds") == 0 })
	s, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	eventually(t, func() string { return "one reader is left" }, func() bool {
		info, err := s.Info(t.Context())
		return err == nil && info.State.Consumers == 1
	})
}

// TestBadInput: a clear error with a hint, and nothing is lost.
func TestBadInput(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.put(5, 1)
	with := func(change func(*consume.Config)) *running {
		cfg := r.config()
		cfg.Metrics = nil
		change(&cfg)
		return r.run(cfg, effect)
	}
	with(func(c *consume.Config) { c.Name, c.NATS, c.Pool, c.Start = "", nil, nil, "later" }).
		fails(nil, "missing Name", "missing NATS", "missing Pool or DB", `Start is "later"`)
	with(func(c *consume.Config) { c.Partitions, c.Batch, c.Seen = 1000, -1, time.Minute }).
		fails(nil, "Partitions is 1000", "Seen is 1m0s")
	with(func(c *consume.Config) { c.Schema = "nowhere" }).fails(nil, "find walpost's tables")
	with(func(c *consume.Config) { c.Name = "a" }).halt()
	r.createStream(func(c *jetstream.StreamConfig) { c.Name, c.Subjects = "OTHER", []string{"other"} })
	x := with(func(*consume.Config) {})
	r.effects(5)
	with(func(c *consume.Config) { c.Stream = "OTHER" }).fails(consume.ErrTaken, `"test" reads stream EVENTS, not OTHER`)
	x.halt()

	const connections = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'walpost consume test'`
	r.waitFor(connections, "0") // or the last one's would be taken for the next one's
	first := r.run(r.config(), effect)
	r.waitFor(connections, "1")
	r.run(r.config(), effect).fails(nil, "register metrics")
	first.halt()

	r.exec(`CREATE SCHEMA empty`)
	with(func(c *consume.Config) { c.Schema = "empty" }).fails(nil, "find walpost's tables")
	r.exec(`DO $$ BEGIN CREATE ROLE nobody_here LOGIN; EXCEPTION WHEN duplicate_object THEN END $$`)
	with(func(c *consume.Config) {
		c.Direct = testenv.SharedPostgres(t).URLFor("nobody_here", r.text(`SELECT current_database()`))
	}).fails(nil, "read walpost's tables")
}

// TestMissingStream is waited for.
func TestMissingStream(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.must(r.js.DeleteStream(t.Context(), "EVENTS"))
	r.run(r.config(), effect)
	r.logs("stream not found")
	time.Sleep(200 * time.Millisecond)
	eventually(t, func() string { return "the stream is there" }, func() bool {
		_, err := r.js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}})
		return err == nil
	})
	r.put(3, 1)
	r.effects(3)
}

// TestPoolerIsRefused for the locks, and serves the transactions.
func TestPoolerIsRefused(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	r := rigOn(t, pg, testenv.NATSOptions{})
	pooler := testenv.NewPooler(t, pg, map[string]string{"pool_mode": "transaction"})
	direct := r.url
	name := r.text(`SELECT current_database()`)
	r.pool = r.newPool(fmt.Sprintf("postgres://postgres@127.0.0.1:%d/%s?sslmode=disable&default_query_exec_mode=exec", pooler.Port(), name))
	x := r.run(r.config(), effect)
	x.fails(nil, "a connection pooler is between")
	cfg := r.config()
	cfg.Direct = direct
	r.run(cfg, effect)
	r.put(50, 5)
	r.effects(50)
}
