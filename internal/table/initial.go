package table

import (
	"context"
	"fmt"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// PendingCount counts the pending rows, up to a limit.
func (db *DB) PendingCount(ctx context.Context, t *outbox.Table, limit int) (n int, err error) {
	err = db.QueryRow(ctx, []any{&n}, fmt.Sprintf(
		`SELECT count(*)::int FROM (SELECT FROM %s t WHERE %s LIMIT %d) p`,
		sourceOf(t).pending, PendingSQL(t, "t"), limit))
	if err != nil {
		return 0, fmt.Errorf("count pending rows of %s: %w", t, err)
	}
	return n, nil
}

// CanSkip reports whether rows of a table can be marked and say that they were not to be sent.
func CanSkip(t *outbox.Table) bool {
	stays := Keeps(t) || MarkOf(t).Stays()
	return stays && (t.Layout.Has(outbox.LastError) || t.Layout.Has(outbox.Status))
}

// skipSQL implements Mark.
func (inRow) skipSQL(t *outbox.Table) string {
	s := sets{table: t}
	if s.state(outbox.Done); t.Layout.Has(outbox.LastError) {
		s.add(outbox.ProcessedAt, "now()")
		s.add(outbox.LastError, pg.QuoteLiteral(Skipped+"postgres.initial is none"))
	}
	return fmt.Sprintf(`WITH marked AS (UPDATE %s t SET %s WHERE %s RETURNING 1)
		SELECT count(*) FROM marked WHERE %s`,
		t.SQL(), s.sql(), PendingSQL(t, "t")+" AND "+BoundSQL(t), pg.OwnPath)
}
