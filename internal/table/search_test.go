package table

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/testenv"
)

// TestSearch: a search takes the time that it needs, ends with its context, and leaves the limit of other statements.
func TestSearch(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 20) g`)
	slow := *table
	slow.Filter = "pg_sleep(0.05)::text = ''"
	slow.Where = slow.Filter
	must(t, db.Limit(t.Context(), 100*time.Millisecond))
	pending := func(ctx context.Context) (n int, err error) {
		err = db.Search(ctx, func(ctx context.Context) (err error) {
			n, err = db.PendingCount(ctx, &slow, 100)
			return err
		})
		return n, err
	}
	if n, err := pending(t.Context()); err != nil || n != 20 {
		t.Errorf("%d rows, %v, want 20", n, err)
	}
	if _, err := db.PendingCount(t.Context(), &slow, 100); pg.Code(err) != pgerrcode.QueryCanceled {
		t.Errorf("behind a search a statement has no limit: %v", err)
	}
	slow.Filter = "pg_sleep(600)::text = ''"
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := pending(ctx); err == nil || ctx.Err() == nil {
		t.Errorf("a search goes on behind its context: %v", err)
	}
}
