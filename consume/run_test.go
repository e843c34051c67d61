package consume_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver of database/sql
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
)

func errorsIs(err, target error) bool { return errors.Is(err, target) }

// TestEachEventTakesEffectOnce in every form, over restarts and beside others.
func TestEachEventTakesEffectOnce(t *testing.T) {
	t.Parallel()
	for form, run := range map[string]func(context.Context, consume.Config) error{
		"one": func(ctx context.Context, cfg consume.Config) error { return consume.Run(ctx, cfg, effect) },
		"batch": func(ctx context.Context, cfg consume.Config) error {
			return consume.RunBatch(ctx, cfg, func(ctx context.Context, tx pgx.Tx, events []consume.Event) error {
				var b pgx.Batch
				for _, e := range events {
					b.Queue(insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
				}
				return tx.SendBatch(ctx, &b).Close()
			})
		},
		"sql": func(ctx context.Context, cfg consume.Config) error {
			return consume.RunSQL(ctx, cfg, func(ctx context.Context, tx *sql.Tx, e consume.Event) error {
				_, err := tx.ExecContext(ctx, insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
				return err
			})
		},
		"external": func(ctx context.Context, cfg consume.Config) error {
			pool := cfg.Pool
			return consume.RunExternal(ctx, cfg, func(ctx context.Context, e consume.Event) error {
				_, err := pool.Exec(ctx, insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
				return err
			})
		},
	} {
		t.Run(form, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			start := func() *running {
				cfg := r.config()
				cfg.Metrics = nil // two in one process
				if form == "sql" {
					db, err := sql.Open("pgx", r.url)
					r.must(err)
					t.Cleanup(func() { _ = db.Close() })
					cfg.Pool, cfg.DB, cfg.Direct = nil, db, r.url
				}
				return r.start(func(ctx context.Context) error { return run(ctx, cfg) })
			}
			r.put(100, 10)
			x := start()
			r.effects(100)
			y := start()
			r.put(100, 10)
			r.effects(200)
			x.halt()
			r.put(100, 10)
			r.effects(300)
			y.halt()
			r.put(50, 10)
			z := start()
			r.effects(350)
			z.halt()
			for _, x := range []*running{x, y, z} {
				if x.err != nil {
					t.Errorf("Run returned %v", x.err)
				}
			}
			r.is(`SELECT count(*) FROM consumer_seen`, "350")
			r.is(`SELECT max(last_processed_id) FROM consumer_offsets`, "350")
			r.is(`SELECT count(*) FROM consumer_parked`, "0")
		})
	}
}

// TestStart is where a new consumer begins.
func TestStart(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.put(3, 1)
	time.Sleep(1100 * time.Millisecond) // times of Start have seconds
	at := time.Now().Truncate(time.Second).UTC().Format(time.RFC3339)
	r.put(3, 1)
	for name, want := range map[string]string{"all": "1 2 3 4 5 6 7", "new": "7", at: "4 5 6 7"} {
		cfg := r.config()
		cfg.Name, cfg.Start, cfg.Metrics = name, name, nil
		r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
			_, err := tx.Exec(ctx, insertSQL, e.ID, name, e.Attempt, e.Epoch)
			return err
		})
		defer func() {
			t.Helper()
			r.waitFor(`SELECT string_agg(event_id, ' ' ORDER BY number) FROM effects WHERE aggregate = '`+name+`'`, want)
		}()
	}
	r.waitFor(`SELECT count(DISTINCT consumer_name) FROM consumer_offsets`, "3")
	r.put(1, 1)
}

// TestFilters: a partition whose events are filtered moves its offset as well.
func TestFilters(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cfg := r.config()
	cfg.Filters = []string{"events.order.paid", "events.order.sent"}
	x := r.run(cfg, effect)
	r.put(200, 10)
	r.store("1001", "x", "order.paid")
	r.store("1002", "x", "order.sent")
	r.put(20, 10)
	r.effects(2)
	r.waitFor(`SELECT count(*) FROM consumer_offsets WHERE last_processed_id = 222 AND anchor_sequence = 222`, "4")
	x.halt()
	cfg.Filters = nil // counts from now on
	r.put(20, 10)
	r.run(cfg, effect)
	r.effects(22)
	r.is(`SELECT filter_subjects FROM consumer_definitions`, "{}")
}

// TestPartitionsAreShared: every process has its part, and the rest of a dead one's is taken over.
func TestPartitionsAreShared(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var mu sync.Mutex
	by := map[string]map[int]bool{}
	begin := func(name string) *running {
		cfg := r.config()
		cfg.Metrics, cfg.Partitions = nil, 6
		return r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
			mu.Lock()
			if by[name] == nil {
				by[name] = map[int]bool{}
			}
			by[name][e.Partition(6)] = true
			mu.Unlock()
			return effect(ctx, tx, e)
		})
	}
	var all []*running
	for _, name := range []string{"a", "b", "c"} {
		all = append(all, begin(name))
	}
	have := func(want int) func() bool {
		return func() bool {
			mu.Lock()
			clear(by)
			mu.Unlock()
			r.put(60, 60)
			r.waitFor(`SELECT count(*) FROM effects`, fmt.Sprint(r.sent))
			mu.Lock()
			defer mu.Unlock()
			for _, partitions := range by {
				if len(partitions) != want {
					return false
				}
			}
			return true
		}
	}
	shared := func() string { return fmt.Sprint(by) }
	eventually(t, shared, have(2))
	all[0].halt()
	eventually(t, shared, have(3))
	all[1].halt()
	eventually(t, shared, have(6))
	r.ordered()
}

// TestDeadOwnersPartitionsAreTakenOver: its locks end with its connection; what it does later has no effect.
func TestDeadOwnersPartitionsAreTakenOver(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cfg := r.config()
	cfg.Metrics = nil
	entered, leave := make(chan bool, 100), make(chan bool)
	x := r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if err := effect(ctx, tx, e); err != nil {
			return err
		}
		entered <- true
		<-leave
		return nil
	})
	r.put(1, 1)
	<-entered
	const owners = `FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'walpost consume%'`
	pid := r.text(`SELECT pid ` + owners)
	y := r.run(cfg, effect)
	r.waitFor(`SELECT count(*) `+owners, "2")
	r.exec(`SELECT pg_terminate_backend($1)`, pid)
	// The transaction holds the lock of its partition's row until the server ends it.
	r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`)
	r.effects(1)
	close(leave)
	r.put(50, 10)
	r.effects(51)
	x.halt()
	y.halt()
}

// TestEventIsStoredTwice: it takes effect once.
func TestEventIsStoredTwice(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = 100 * time.Millisecond })
	r.put(5, 2)
	time.Sleep(300 * time.Millisecond)
	r.sent = 0
	r.put(5, 2)
	r.is(`SELECT 1`, "1")
	r.run(r.config(), effect)
	r.waitFor(`SELECT max(last_processed_id) FROM consumer_offsets`, "10")
	r.effects(5)
}

// TestNumberOfPartitionsChanges: events of the old partitions are not handled again, and none is left out.
func TestNumberOfPartitionsChanges(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cfg := r.config()
	cfg.Metrics, cfg.Grace = nil, 100*time.Millisecond
	block := make(chan bool)
	x := r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.Partition(4) == 1 { // its offset stays behind
			select {
			case <-block:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return effect(ctx, tx, e)
	})
	r.put(100, 40)
	others := 0
	for n := 1; n <= 100; n++ {
		if e := (consume.Event{AggregateType: "order", AggregateID: fmt.Sprintf("a%d", n%40)}); e.Partition(4) != 1 {
			others++
		}
	}
	r.waitFor(`SELECT count(*) FROM effects`, fmt.Sprint(others))
	cfg.Partitions = 3
	y := r.run(cfg, effect)
	r.logs("waits until no process with another definition runs")
	x.halt()
	r.effects(100)
	y.halt()
	cfg.Partitions = 5
	r.put(50, 40)
	r.run(cfg, effect)
	r.effects(150)
	r.is(`SELECT count(*) FROM consumer_offsets`, "5")
}

// TestStopWaitsForHandlers, and commits what they did.
func TestStopWaitsForHandlers(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	entered, leave := make(chan bool, 1), make(chan bool)
	x := r.run(r.config(), func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		entered <- true
		<-leave
		return effect(ctx, tx, e)
	})
	r.put(1, 1)
	<-entered
	x.stop()
	time.Sleep(50 * time.Millisecond)
	close(leave)
	x.ends()
	r.effects(1)
	r.is(`SELECT max(last_processed_id) FROM consumer_offsets`, "1")
	if x.err != nil {
		t.Errorf("Run returned %v", x.err)
	}
}

// TestServersGoAway: the consumer waits for them.
func TestServersGoAway(t *testing.T) {
	t.Parallel()
	pg := testenv.NewPostgres(t, testenv.PGOptions{})
	r := rigOn(t, pg, testenv.NATSOptions{Process: true})
	r.run(r.config(), effect)
	r.put(50, 10)
	r.effects(50)
	r.must(pg.Stop(t.Context(), testenv.Immediate))
	r.put(50, 10)
	time.Sleep(100 * time.Millisecond)
	r.must(pg.Start(t.Context()))
	r.pool = r.newPool(r.url) // the consumer keeps the other, with its broken connections
	r.effects(100)
	r.must(r.nats.Kill())
	r.must(r.nats.Start(t.Context()))
	r.put(50, 10)
	r.effects(150)
	r.is(`SELECT count(*) FROM consumer_parked`, "0")
}
