package relay_test

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
)

// TestPartitionIsTheFirstToken of the subject, the one that package consume computes from the message.
func TestPartitionIsTheFirstToken(t *testing.T) {
	t.Parallel()
	for _, batching := range []jetstream.Batching{jetstream.BatchSingle, jetstream.BatchFast} {
		t.Run(string(batching), func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.cfg.Subject, r.cfg.Stream.Batching = "{partition/4}.events.{event_type}", batching
			x := r.start().streaming()
			r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
				SELECT n % 3, 'order', n % 20, 'order.placed', '{}' FROM generate_series(1, 200) n`)
			r.pending(0)
			s, err := r.js().Stream(t.Context(), "EVENTS")
			r.must(err)
			if got := strings.Join(s.CachedInfo().Config.Subjects, " "); got != "0.events.> 1.events.> 2.events.> 3.events.>" {
				t.Errorf("the stream listens on %s", got)
			}
			pool, err := pgxpool.New(t.Context(), r.url)
			r.must(err)
			defer pool.Close()
			var mu sync.Mutex
			counts := map[int]int{}
			total := 0
			ctx, stop := context.WithCancel(t.Context())
			defer stop()
			err = consume.Run(ctx, consume.Config{
				Name: "partitions", Pool: pool, NATS: r.js().Conn(), Start: "all", Partitions: 4,
				Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
			}, func(_ context.Context, _ pgx.Tx, e consume.Event) error {
				mu.Lock()
				defer mu.Unlock()
				token, _, _ := strings.Cut(e.Subject, ".")
				if p, err := strconv.Atoi(token); err != nil || p != e.Partition(4) {
					t.Errorf("subject %s, partition %d", e.Subject, e.Partition(4))
				}
				counts[e.Partition(4)]++
				if total++; total == 200 {
					stop()
				}
				return nil
			})
			if err != nil || len(counts) != 4 {
				t.Errorf("events by partition: %v (%v)", fmt.Sprint(counts), err)
			}
			x.quiet()
		})
	}
}
