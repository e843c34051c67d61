package bench

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/sleep"
)

// writers is how many sessions commit. A rate is a schedule: a session that is late for its next commit makes
// it at once.
const writers = 8

// latency measures how long a row takes from its commit to its PubAck and to a consumer, while rate
// transactions of one row are committed a second.
func (b *bench) latency(ctx context.Context, mark string, rate int) error {
	b.Say("latency at %d commits a second, mark %s", rate, mark)
	set := Setting{URL: b.url, Mark: mark, Batch: b.Batches[len(b.Batches)-1], Of: 1}
	if err := b.prepare(ctx, set, 1); err != nil {
		return err
	}
	work, stop := context.WithCancel(ctx)
	defer stop()
	var mu sync.Mutex
	var acks []time.Duration
	measuring := false
	relaying, ended := error(nil), make(chan struct{})
	go func() {
		defer close(ended)
		relaying = b.Relay(work, set, func(d time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			if measuring {
				acks = append(acks, d)
			}
		})
	}()
	hasEnded := func() error {
		select {
		case <-ended:
			return errors.Join(relaying, errors.New("it has ended"))
		default:
			return nil
		}
	}
	arrivals, err := b.consume(work)
	if err != nil {
		return err
	}
	if err := b.write(ctx, set, 100, 2*time.Second, nil); err != nil { // warm
		return err
	}
	if err := b.settled(ctx, set.Mark, hasEnded); err != nil {
		return err
	}
	if err := b.none(ctx, unjoinedSQL, hasEnded); err != nil {
		return err
	}
	mu.Lock()
	measuring = true
	mu.Unlock()
	commits := &commits{at: make([]time.Time, int(float64(rate)*b.For.Seconds())+writers)}
	begun := time.Now()
	if err := b.write(ctx, set, rate, b.For, commits); err != nil {
		return err
	}
	took := time.Since(begun)
	if err := b.settled(ctx, set.Mark, hasEnded); err != nil {
		return err
	}
	if !sleep.For(ctx, 200*time.Millisecond) {
		return context.Cause(ctx)
	}
	stop()
	if <-ended; relaying != nil && !errors.Is(relaying, context.Canceled) {
		return relaying
	}
	if b.postgres == 0 {
		b.report.note("the time to the PubAck is by two clocks, PostgreSQL's and this machine's: " +
			"it holds what they differ by")
	}
	mu.Lock()
	defer mu.Unlock()
	l := Latency{Mark: mark, Rate: rate, Reached: float64(len(acks)) / took.Seconds()}
	l.PubAck, l.Consumer = quantiles(acks), quantiles(arrivals.after(commits))
	b.report.Latencies = append(b.report.Latencies, l)
	return nil
}

// commits are the times when each commit was answered, by the row's number.
type commits struct {
	mu sync.Mutex
	at []time.Time
}

// insertSQL commits a row by itself.
func (s Setting) insertSQL() string {
	return `INSERT INTO ` + s.table() + ` (aggregate_type, aggregate_id, event_type, payload)
		VALUES ('bench', $1::int, '` + event + `', jsonb_build_object('n', $2::int, 'pad', $3::text))`
}

// write commits rows at a rate for some time.
func (b *bench) write(ctx context.Context, set Setting, rate int, d time.Duration, c *commits) error {
	sql, pad, n := set.insertSQL(), pad(b.Payload), int(float64(rate)*d.Seconds())
	begun := time.Now()
	return b.sessions(ctx, writers, func(w int, conn *pgx.Conn) error {
		for i := w; i < n; i += writers {
			due := time.Duration(float64(i) / float64(rate) * float64(time.Second))
			if wait := time.Until(begun.Add(due)); wait > 0 && !sleep.For(ctx, wait) {
				return context.Cause(ctx)
			}
			number := -1
			if c != nil {
				number = i
			}
			if _, err := conn.Exec(ctx, sql, i%1000, number, pad); err != nil {
				return err
			}
			if c != nil {
				c.mu.Lock()
				c.at[i] = time.Now()
				c.mu.Unlock()
			}
		}
		return nil
	})
}

// sessions runs do in n sessions at the same time, each with its number.
func (b *bench) sessions(ctx context.Context, n int, do func(w int, conn *pgx.Conn) error) error {
	errs := make([]error, n)
	var all sync.WaitGroup
	for w := range n {
		all.Go(func() {
			conn, err := b.connect(ctx)
			if err != nil {
				errs[w] = err
				return
			}
			defer conn.Close(ctx)
			errs[w] = do(w, conn)
		})
	}
	all.Wait()
	return errors.Join(errs...)
}

// arrivals are the times when each row came to a consumer, by its number.
type arrivals struct {
	mu sync.Mutex
	at map[int]time.Time
}

func (b *bench) consume(ctx context.Context) (*arrivals, error) {
	a := &arrivals{at: map[int]time.Time{}}
	consumer, err := b.js.OrderedConsumer(ctx, Stream, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, err
	}
	running, err := consumer.Consume(func(m jetstream.Msg) {
		now := time.Now()
		var row struct{ N int }
		if json.Unmarshal(m.Data(), &row) != nil || row.N < 0 {
			return
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		a.at[row.N] = now
	})
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, running.Stop)
	return a, nil
}

// after is how long after its commit each row came. A row that came before the COMMIT was answered counts as
// 0.
func (a *arrivals) after(c *commits) (all []time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for n, at := range a.at {
		if n < len(c.at) && !c.at[n].IsZero() {
			all = append(all, max(0, at.Sub(c.at[n])))
		}
	}
	return all
}

// quantiles of measured times.
func quantiles(all []time.Duration) (q Quantiles) {
	if len(all) == 0 {
		return q
	}
	slices.Sort(all)
	at := func(p float64) time.Duration { return all[min(int(p*float64(len(all))), len(all)-1)] }
	return Quantiles{len(all), at(0.5), at(0.99), at(0.999), all[len(all)-1]}
}
