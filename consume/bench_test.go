package consume_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

// BenchmarkDrain measures events a second, of a stream that has them already. "plain" is what people write
// without this package: a durable pull consumer, a transaction and an acknowledgement for each message.
func BenchmarkDrain(b *testing.B) {
	for _, form := range []string{"plain", "one", "batch"} {
		b.Run(form, func(b *testing.B) {
			r := benchRig(b)
			r.put(b.N, 100)
			b.ResetTimer()
			r.drain(form)
			r.waitFor(`SELECT count(*) FROM effects`, fmt.Sprint(b.N))
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// BenchmarkLatency measures the time from an event's storage to its effect's commit, at 1,000 events a
// second.
func BenchmarkLatency(b *testing.B) {
	for _, form := range []string{"plain", "one", "batch"} {
		b.Run(form, func(b *testing.B) {
			r := benchRig(b)
			r.drain(form)
			r.put(100, 100) // it is connected
			r.waitFor(`SELECT count(*) FROM effects`, "100")
			took := r.watchCommits()
			for next := time.Now(); b.Loop(); next = next.Add(time.Millisecond) {
				time.Sleep(time.Until(next))
				r.sent++
				took.sent(fmt.Sprint(r.sent))
				r.store(fmt.Sprint(r.sent), fmt.Sprintf("a%d", r.sent%100), "order.placed")
			}
			r.waitFor(`SELECT count(*) FROM effects`, fmt.Sprint(b.N+100))
			b.ReportMetric(took.quantile(0.5), "p50-ms")
			b.ReportMetric(took.quantile(0.99), "p99-ms")
		})
	}
}

func benchRig(b *testing.B) *rig {
	b.Helper()
	pg := testenv.NewPostgres(b, testenv.PGOptions{FSync: true})
	r := rigOn(b, pg, testenv.NATSOptions{Process: true})
	r.pool = r.newPool(r.url + "&pool_max_conns=10")
	return r
}

// drain starts a consumer of one form.
func (r *rig) drain(form string) {
	r.t.Helper()
	cfg := r.config()
	cfg.Partitions = 8
	switch form {
	case "one":
		r.run(cfg, effect)
	case "batch":
		r.start(func(ctx context.Context) error {
			return consume.RunBatch(ctx, cfg, func(ctx context.Context, tx pgx.Tx, events []consume.Event) error {
				ids, aggregates := make([]string, len(events)), make([]string, len(events))
				for i, e := range events {
					ids[i], aggregates[i] = e.ID, e.AggregateID
				}
				_, err := tx.Exec(ctx, `INSERT INTO effects (event_id, aggregate, attempt, epoch)
					SELECT *, 1, 1 FROM unnest($1::text[], $2::text[])`, ids, aggregates)
				return err
			})
		})
	default:
		r.start(func(ctx context.Context) error { return plain(ctx, r.js, r.pool, insertSQL) })
	}
}

// plain is what people write without this package: a durable pull consumer with eight workers, a transaction
// and an acknowledgement for each message.
func plain(ctx context.Context, js jetstream.JetStream, pool *pgxpool.Pool, insert string) error {
	c, err := js.CreateOrUpdateConsumer(ctx, "EVENTS", jetstream.ConsumerConfig{
		Durable: "plain", AckPolicy: jetstream.AckExplicitPolicy, AckWait: 5 * time.Second, MaxAckPending: 10_000,
	})
	if err != nil {
		return err
	}
	messages, err := c.Messages(jetstream.PullMaxMessages(1000))
	if err != nil {
		return err
	}
	var working sync.WaitGroup
	for range 8 {
		working.Go(func() {
			for {
				m, err := messages.Next()
				if err != nil {
					return
				}
				err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
					_, err := tx.Exec(ctx, insert, m.Headers().Get("ce-id"), m.Headers().Get("ce-aggregateid"), 1, 0)
					return err
				})
				if err == nil {
					_ = m.Ack()
				}
			}
		})
	}
	stop := context.AfterFunc(ctx, messages.Stop)
	working.Wait()
	stop()
	messages.Stop()
	return nil
}

// commits has the time from an event's publication to when its effect was seen to be committed.
type commits struct {
	mu    sync.Mutex
	began map[string]time.Time
	took  []time.Duration
}

func (c *commits) sent(id string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.began[id] = time.Now()
}

func (c *commits) quantile(q float64) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	slices.Sort(c.took)
	if len(c.took) == 0 {
		return 0
	}
	return float64(c.took[int(q*float64(len(c.took)-1))]) / float64(time.Millisecond)
}

// watchCommits has PostgreSQL announce effects: a notification comes with the commit.
func (r *rig) watchCommits() *commits {
	r.t.Helper()
	r.exec(`CREATE FUNCTION announce() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_notify('effects', NEW.event_id); RETURN NULL; END $$;
		CREATE TRIGGER announce AFTER INSERT ON effects FOR EACH ROW EXECUTE FUNCTION announce()`)
	pool, err := pgxpool.New(r.t.Context(), r.url)
	r.must(err)
	r.t.Cleanup(pool.Close)
	conn, err := pool.Acquire(r.t.Context())
	r.must(err)
	_, err = conn.Exec(r.t.Context(), `LISTEN effects`)
	r.must(err)
	c := &commits{began: map[string]time.Time{}}
	ctx, cancel := context.WithCancel(r.t.Context())
	done := make(chan bool)
	go func() {
		defer close(done)
		for {
			n, err := conn.Conn().WaitForNotification(ctx)
			if err != nil {
				conn.Release()
				return
			}
			now := time.Now()
			c.mu.Lock()
			if at, ok := c.began[n.Payload]; ok {
				c.took = append(c.took, now.Sub(at))
				delete(c.began, n.Payload)
			}
			c.mu.Unlock()
		}
	}()
	r.t.Cleanup(func() { cancel(); <-done })
	return c
}
