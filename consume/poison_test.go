package consume_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/consume"
)

// TestFailedEventIsParked: later events of its aggregate wait behind it, others do not.
func TestFailedEventIsParked(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var healed atomic.Bool
	cfg := r.config()
	cfg.MaxAttempts = 1_000_000
	x := r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.ID == "5" && !healed.Load() {
			if err := effect(ctx, tx, e); err != nil { // it is rolled back
				return err
			}
			return errors.New("the handler does not know this order")
		}
		return effect(ctx, tx, e)
	})
	r.put(60, 4) // 5, 9, 13 ... belong to a1
	r.waitFor(`SELECT count(*) FROM effects WHERE aggregate <> 'a1'`, "45")
	r.waitFor(`SELECT count(*) FROM consumer_parked`, "14")
	r.is(`SELECT string_agg(event_id, ' ') FROM effects WHERE aggregate = 'a1'`, "1")
	r.is(`SELECT event_id || ' ' || last_error FROM consumer_parked WHERE attempts > 0`, "5 the handler does not know this order")
	x.halt()
	r.is(`SELECT string_agg(DISTINCT last_processed_id::text, ' ') FROM consumer_offsets`, "60")
	// The parked events outlive the process and the stream's.
	s, err := r.js.Stream(t.Context(), "EVENTS")
	r.must(err)
	r.must(s.Purge(t.Context()))
	var failures atomic.Int64
	x = r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if !healed.Load() && e.ID == "5" {
			failures.Add(1)
			return errors.New("still")
		}
		if string(e.Payload) != `{"id":"`+e.ID+`"}` || e.Header.Get("ce-source") != "test" {
			return fmt.Errorf("payload %q, headers %v", e.Payload, e.Header)
		}
		return effect(ctx, tx, e)
	})
	r.put(20, 4)
	r.waitFor(`SELECT count(*) FROM consumer_parked`, "19")
	r.waitFor(`SELECT max(attempts) > 2 AND bool_or(last_error = 'still') FROM consumer_parked`, "true")
	healed.Store(true)
	r.effects(80)
	r.is(`SELECT count(*) FROM consumer_parked`, "0")
	if n := r.metric("consumer_failures_total"); n != float64(failures.Load()) {
		t.Errorf("consumer_failures_total is %v, and the handler failed %d times", n, failures.Load())
	}
	x.halt()
}

// TestDeadLetter: after its last attempt an event is out of the way of its aggregate.
func TestDeadLetter(t *testing.T) {
	t.Parallel()
	for _, most := range []int{1, 3} {
		t.Run(fmt.Sprint(most), func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			var healed atomic.Bool
			cfg := r.config()
			cfg.MaxAttempts = most
			r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
				if e.ID == "2" && !healed.Load() {
					return errors.New("no")
				}
				return effect(ctx, tx, e)
			})
			r.put(20, 2)
			r.effects(19)
			r.is(`SELECT string_agg(event_id || ' ' || attempts, ' ') FROM consumer_parked WHERE dead_at IS NOT NULL`, fmt.Sprintf("2 %d", most))
			r.logs("event is a dead letter")
			r.logs("walpost consumers dlq retry --consumer test")
			healed.Store(true)
			r.exec(`UPDATE consumer_parked SET dead_at = NULL, attempts = 0, next_attempt_at = now()`)
			r.waitFor(`SELECT count(*) FROM effects`, "20")
			r.is(`SELECT count(*) FROM consumer_parked`, "0")
		})
	}
}

// TestLongAggregate: the events of an aggregate with a name that no index takes wait behind a failed one, and no others.
func TestLongAggregate(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var healed atomic.Bool
	long := r.text(`SELECT left(string_agg(md5(n::text), ''), 6080) FROM generate_series(1, 200) n`)
	r.run(r.config(), func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.ID == "1001" && !healed.Load() {
			return errors.New("no")
		}
		return effect(ctx, tx, e)
	})
	r.put(10, 2)
	for _, id := range []string{"1001", "1002"} {
		<-r.store(id, long, "order.placed").Ok()
	}
	r.put(10, 2)
	r.effects(20)
	r.waitFor(`SELECT count(*) FROM consumer_parked`, "2")
	healed.Store(true)
	r.effects(22)
	r.is(`SELECT count(*) FROM consumer_parked`, "0")
}

// TestSkipPoison lets the aggregate's later events pass.
func TestSkipPoison(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	cfg := r.config()
	cfg.SkipPoison = true
	r.run(cfg, func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
		if e.ID == "2" && e.Attempt < 4 {
			return errors.New("no")
		}
		return effect(ctx, tx, e)
	})
	r.put(20, 2)
	r.waitFor(`SELECT count(*) FROM effects`, "20")
	r.is(`SELECT count(*) FROM effects WHERE attempt > 1`, "1")
}

// TestWaysToFail are counted as attempts, leave no effect, and wedge nothing.
func TestWaysToFail(t *testing.T) {
	t.Parallel()
	type handler = func(context.Context, pgx.Tx, consume.Event) error
	for name, bad := range map[string]handler{
		"panic":   func(context.Context, pgx.Tx, consume.Event) error { panic("oh") },
		"goexit":  func(context.Context, pgx.Tx, consume.Event) error { runtime.Goexit(); return nil },
		"timeout": func(ctx context.Context, _ pgx.Tx, _ consume.Event) error { <-ctx.Done(); return ctx.Err() },
		"deaf": func(_ context.Context, tx pgx.Tx, _ consume.Event) error {
			_, err := tx.Exec(context.Background(), `SELECT pg_sleep(60)`)
			return err
		},
		"own timeout": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error {
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			_, err := tx.Exec(ctx, `SELECT pg_sleep(60)`)
			return err
		},
		"cancelled": func(context.Context, pgx.Tx, consume.Event) error {
			return fmt.Errorf("ask a service: %w", context.Canceled)
		},
		"open rows": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error {
			_, err := tx.Query(ctx, `SELECT * FROM generate_series(1, 10)`)
			return err
		},
		"late success": func(context.Context, pgx.Tx, consume.Event) error {
			time.Sleep(1600 * time.Millisecond)
			return nil
		},
		"hidden error": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error {
			_, _ = tx.Exec(ctx, `SELECT 1 / 0`)
			return nil
		},
		"deferred constraint": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error {
			_, err := tx.Exec(ctx, `INSERT INTO child (parent) VALUES (1)`)
			return err
		},
		"rollback": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error {
			_, err := tx.Exec(ctx, `ROLLBACK`)
			return err
		},
		"rollback and begin": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error {
			_, err := tx.Exec(ctx, `ROLLBACK`)
			if err == nil {
				_, err = tx.Exec(ctx, `BEGIN`)
			}
			return err
		},
		"commits": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error { return tx.Commit(ctx) },
		"statement timeout": func(ctx context.Context, tx pgx.Tx, _ consume.Event) error {
			_, err := tx.Exec(ctx, `SET LOCAL statement_timeout = '10ms'; SELECT pg_sleep(60)`)
			return err
		},
		"odd text": func(context.Context, pgx.Tx, consume.Event) error {
			return errors.New("\x00\xff" + strings.Repeat("ä", 9000))
		},
	} {
		for _, batch := range []bool{false, true} {
			if batch && name == "rollback" {
				continue // the batch's later events are handled outside of any transaction
			}
			t.Run(fmt.Sprintf("%s, batch %t", name, batch), func(t *testing.T) {
				t.Parallel()
				r := newRig(t)
				r.exec(`CREATE TABLE parent (id INT PRIMARY KEY); CREATE TABLE child (parent INT REFERENCES parent DEFERRABLE INITIALLY DEFERRED)`)
				cfg := r.config()
				cfg.Timeout = 300 * time.Millisecond
				h := func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
					if err := effect(ctx, tx, e); err != nil {
						return err
					}
					if e.ID == "3" && e.Attempt < 2 {
						return bad(ctx, tx, e)
					}
					return nil
				}
				if !batch {
					r.run(cfg, h)
				} else {
					r.start(func(ctx context.Context) error {
						return consume.RunBatch(ctx, cfg, func(ctx context.Context, tx pgx.Tx, events []consume.Event) (err error) {
							for _, e := range events {
								err = errors.Join(err, h(ctx, tx, e))
							}
							return err
						})
					})
				}
				r.put(30, 3)
				r.effects(30)
				r.is(`SELECT attempt FROM effects WHERE event_id = '3'`, "2")
				r.is(`SELECT count(*) FROM child`, "0")
			})
		}
	}
}

// TestOutageIsNoAttempt: these errors say nothing of the event.
func TestOutageIsNoAttempt(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"40001", "40P01", "55P03", "08006", "53300", "57P03"} {
		t.Run(code, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			var calls atomic.Int64
			r.run(r.config(), func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
				if calls.Add(1) < 4 {
					_, err := tx.Exec(ctx, `DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '`+code+`'; END $$`)
					return fmt.Errorf("do something: %w", err)
				}
				return effect(ctx, tx, e)
			})
			r.put(1, 1)
			r.effects(1)
			r.is(`SELECT attempt FROM effects`, "1")
			r.logs("handle events of partition")
			r.logs("consumer goes on")
		})
	}
	t.Run("killed", func(t *testing.T) {
		t.Parallel()
		r := newRig(t)
		var calls atomic.Int64
		r.run(r.config(), func(ctx context.Context, tx pgx.Tx, e consume.Event) error {
			if calls.Add(1) < 3 {
				_, err := tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
				return errors.Join(err, errors.New("own error"))
			}
			return effect(ctx, tx, e)
		})
		r.put(1, 1)
		r.effects(1)
		r.is(`SELECT attempt FROM effects`, "1")
	})
}

// TestCommitOfDatabaseSQLIsNoticed: the effect stays, and comes again.
func TestCommitOfDatabaseSQLIsNoticed(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	db, err := sql.Open("pgx", r.url)
	r.must(err)
	t.Cleanup(func() { _ = db.Close() })
	cfg := r.config()
	cfg.Pool, cfg.DB, cfg.Direct = nil, db, r.url
	r.start(func(ctx context.Context) error {
		return consume.RunSQL(ctx, cfg, func(ctx context.Context, tx *sql.Tx, e consume.Event) error {
			_, err := tx.ExecContext(ctx, insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
			if e.ID == "1" && e.Attempt < 3 && err == nil {
				err = tx.Commit()
			}
			return err
		})
	})
	r.put(4, 2)
	r.waitFor(`SELECT string_agg(event_id || '/' || attempt, ' ' ORDER BY event_id, attempt) FROM effects`, "1/1 1/2 1/3 2/1 3/1 4/1")
	r.logs("the handler ended the transaction")
}

func (r *rig) metric(name string) (sum float64) {
	r.t.Helper()
	families, err := r.metrics.Gather()
	r.must(err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return sum
}
