package table

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

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

// SkipPending marks every row that is pending now, and says so in each, unless it
// has done so before: one transaction, so it is done whole, for all tables, or not
// at all. It returns how many they were of each. It needs layouts that [CanSkip]. It
// waits for rows that are locked.
func SkipPending(ctx context.Context, cfg Config, tables []*outbox.Table) (rows []int64, err error) {
	db, err := Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Hour)
		defer cancel()
		const limits = `SET lock_timeout = '1min'; SET statement_timeout = 0; SET enable_seqscan = on`
		if _, err := conn.Exec(ctx, limits); err != nil {
			return err
		}
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			for _, t := range tables {
				var n int64
				err := tx.QueryRow(ctx, MarkOf(t).skipSQL(t)).Scan(&n)
				if err == nil {
					_, err = tx.Exec(ctx, pg.HidePath)
				}
				if err != nil {
					return fmt.Errorf("mark the rows that are pending in %s: %w", t, err)
				}
				rows = append(rows, n)
			}
			_, err := tx.Exec(ctx, pg.ShowPath)
			return err
		})
	})
	return rows, err
}

// CanSkip reports whether rows of a table can be marked and say that they were not to be sent.
func CanSkip(t *outbox.Table) bool {
	stays := Keeps(t) || MarkOf(t).Stays()
	return stays && (t.Layout.Has(outbox.LastError) || t.Layout.Has(outbox.Status))
}

// skipSQL implements Mark.
func (inRow) skipSQL(t *outbox.Table) string {
	s := sets{table: t}
	done := MarkedSQL(t, "s")
	if s.state(outbox.Done); t.Layout.Has(outbox.LastError) {
		s.add(outbox.ProcessedAt, "now()")
		s.add(outbox.LastError, pg.QuoteLiteral(Skipped+"postgres.initial is none"))
		done += fmt.Sprintf(" AND s.%s LIKE '%s%%'", t.Column(outbox.LastError), Skipped)
	}
	return fmt.Sprintf(`WITH marked AS (UPDATE %s t SET %s WHERE %s
			AND NOT EXISTS (SELECT FROM %[1]s s WHERE %[4]s%[5]s) RETURNING 1)
		SELECT count(*) FROM marked WHERE %[6]s`,
		t.SQL(), s.sql(), PendingSQL(t, "t"), done, FilterSQL(t, "s"), pg.OwnPath)
}
