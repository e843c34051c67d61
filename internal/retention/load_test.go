package retention_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// counts are the rows of outbox and archive in one snapshot, and how many ids
// they have.
func (b *bench) counts() (outbox, archived, ids int) {
	b.t.Helper()
	b.must(b.app.QueryRow(b.t.Context(), `SELECT (SELECT count(*) FROM outbox_messages), (SELECT count(*) FROM outbox_messages_archive),
		(SELECT count(DISTINCT id) FROM (SELECT id FROM outbox_messages UNION ALL SELECT id FROM outbox_messages_archive) x)`).Scan(&outbox, &archived, &ids))
	return outbox, archived, ids
}

// TestRetainAddsUp: while rows are inserted, marked and made pending again, each
// is in one place, and those that were made pending stay.
func TestRetainAddsUp(t *testing.T) {
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		var inserted int
		var pending []int64
		work := func(step func(*pgx.Conn) error) {
			conn := b.connect()
			wg.Go(func() {
				for ctx.Err() == nil {
					if err := step(conn); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		work(func(c *pgx.Conn) error {
			_, err := c.Exec(t.Context(), `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at)
				SELECT 'order', i, 'x', '{}', now() - random() * interval '400 days' FROM generate_series(1, 100) i, pg_sleep(0.01)`)
			inserted += 100
			return err
		})
		work(func(c *pgx.Conn) error {
			_, err := c.Exec(t.Context(), `UPDATE outbox_messages SET processed_at = now() - random() * interval '2 hours' WHERE id = ANY (ARRAY(
				SELECT id FROM outbox_messages WHERE processed_at IS NULL AND last_error IS NULL ORDER BY id LIMIT 200 FOR UPDATE SKIP LOCKED))`)
			return err
		})
		work(func(c *pgx.Conn) error {
			rows, _ := c.Query(t.Context(), `UPDATE outbox_messages SET processed_at = NULL, last_error = 'again' WHERE id = ANY (ARRAY(
				SELECT id FROM outbox_messages WHERE processed_at < now() - interval '50 minutes' ORDER BY processed_at LIMIT 2)) AND processed_at IS NOT NULL RETURNING id`)
			time.Sleep(2 * time.Millisecond)
			ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
			pending = append(pending, ids...)
			return err
		})
		moved := 0
		for deadline := time.Now().Add(3 * time.Second); time.Now().Before(deadline); {
			moved += int(b.retain().Tables[0].Archived)
		}
		cancel()
		wg.Wait()
		moved += int(b.retain(func(o *retention.Options) { o.DropAfter = 300 * day }).Tables[0].Archived)
		left, archived, ids := b.counts()
		t.Logf("%d inserted, %d archived, %d left, %d made pending again", inserted, archived, left, len(pending))
		if left+archived != inserted || ids != inserted || archived != moved || moved == 0 || len(pending) == 0 {
			t.Errorf("%d rows inserted, %d left and %d archived (%d reported) with %d ids", inserted, left, archived, moved, ids)
		}
		var kept int
		b.must(b.app.QueryRow(t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND id = ANY ($1)`, pending).Scan(&kept))
		if kept != len(pending) {
			t.Errorf("%d rows were made pending again, %d are", len(pending), kept)
		}
		b.wantText("old rows left", `SELECT count(*) FROM outbox_messages WHERE processed_at < now() - interval '1 hour' - interval '1 minute'`, "0")
	})
}

// TestRetainGoesOn after passes that were cancelled, or lost their connection, at
// any moment.
func TestRetainGoesOn(t *testing.T) {
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		const rows = 20000
		b := newBench(t, pg, outbox.MarkUpdate)
		for i := range 4 {
			b.delivered(rows/4, fmt.Sprintf("%d days", 40*i), fmt.Sprintf("%d hours", 2+i))
		}
		b.exec(`UPDATE outbox_messages SET occurred_at = '2099-01-01' WHERE id % 100 = 0`)
		killer := b.connect()
		broken := 0
		for pass := 0; ; pass++ {
			if pass > 500 {
				t.Fatal("no pass ever ends")
			}
			ctx, cancel := context.WithCancel(t.Context())
			ended := make(chan struct{})
			var breaker sync.WaitGroup
			breaker.Go(func() {
				for hit := false; !hit; {
					select {
					case <-ended:
						return
					case <-time.After(time.Duration(rand.IntN(200+20*pass)) * time.Millisecond):
					}
					if pass%2 == 0 {
						cancel()
						return
					}
					tag, _ := killer.Exec(context.Background(), `SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND granted
						AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`)
					hit = tag.RowsAffected() > 0
				}
			})
			_, err := b.tryRetain(ctx)
			close(ended)
			breaker.Wait()
			cancel()
			left, archived, ids := b.counts()
			if left+archived != rows || ids != rows {
				t.Fatalf("after %v: %d left, %d archived, %d ids, want %d", err, left, archived, ids, rows)
			}
			if err != nil {
				broken++
			} else if left == 0 {
				break
			}
		}
		if broken == 0 {
			t.Error("no pass was broken off")
		}
		b.wantText("strays", `SELECT count(*) FROM pg_class WHERE relname ~ '^outbox_messages_archive_20' AND relkind = 'r' AND NOT relispartition`, "0")
	})
}

// TestRetainWorksOffABacklog while a producer inserts and a transaction holds a
// snapshot, so that no dead row can be cleaned away.
func TestRetainWorksOffABacklog(t *testing.T) {
	rows := testenv.Size(t, 30_000, 100_000)
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
		SELECT 'order', i, 'order.created', jsonb_build_object('text', repeat('x', 200)), now() - interval '8 days', now() - interval '8 days' + i / 500 * interval '1 ms'
		FROM generate_series(1, $1) i`, rows)
	snapshot, err := b.connect().BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	b.must(err)
	_, err = snapshot.Exec(t.Context(), `SELECT 1 FROM outbox_messages LIMIT 1`)
	b.must(err)

	quiet := b.latencies(func() { time.Sleep(time.Second) })
	var r *retention.Report
	start := time.Now()
	busy := b.latencies(func() { r = b.retain() })
	took := time.Since(start)
	t.Logf("%d rows in %s (%.0f/s); an insert took %s (median) and %s (99 %%) before, %s and %s meanwhile",
		rows, took.Round(time.Millisecond), float64(rows)/took.Seconds(), part(quiet, 50), part(quiet, 99), part(busy, 50), part(busy, 99))
	if r.Tables[0].Archived != int64(rows) {
		t.Errorf("report %+v", r)
	}
	if slow := part(busy, 99); slow > took/2 {
		t.Errorf("producers had to wait for the pass: %s", slow)
	}
}

// latencies are those of single-row inserts while f runs, sorted.
func (b *bench) latencies(f func()) (all []time.Duration) {
	b.t.Helper()
	conn := b.connect()
	stop, done := make(chan struct{}), make(chan error, 1)
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			case <-time.After(2 * time.Millisecond):
			}
			start := time.Now()
			_, err := conn.Exec(context.Background(), `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'x', '{}')`)
			if err != nil {
				done <- err
				return
			}
			all = append(all, time.Since(start))
		}
	}()
	f()
	close(stop)
	b.must(<-done)
	slices.Sort(all)
	return all
}

func part(sorted []time.Duration, percent int) time.Duration {
	if len(sorted) == 0 {
		return 0
	}
	return sorted[len(sorted)*percent/100].Round(10 * time.Microsecond)
}

// TestRetainReadsInTheIndexOrder: whatever the statistics say, a batch of a long
// backlog reads its own rows and no others.
func TestRetainReadsInTheIndexOrder(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		b.delivered(1, "2 hours", "2 hours")
		b.exec(`VACUUM ANALYZE outbox_messages`)
		b.delivered(30000, "2 hours", "2 hours")
		b.exec(`LOAD 'auto_explain'`)
		b.exec(`ALTER SYSTEM SET session_preload_libraries = 'auto_explain'`)
		b.exec(`ALTER SYSTEM SET auto_explain.log_min_duration = 0`)
		b.must(pg.Reload(t.Context(), nil))
		b.retain()
		log := pg.Log()
		if !strings.Contains(log, "Index Scan using outbox_messages_processed_idx") || !strings.Contains(log, "Tid Scan on outbox_messages") {
			t.Fatalf("the plans are not in the log:\n%s", log)
		}
		for _, bad := range []string{"Sort", "Bitmap", "Seq Scan on outbox_messages"} {
			if strings.Contains(log, bad) {
				t.Errorf("a plan has %q:\n%s", bad, log)
			}
		}
	})
}
