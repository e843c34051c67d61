package shop

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/consume"
)

// Audit appends every change to audit_log, with what was before it, until ctx is done.
func Audit(ctx context.Context, cfg consume.Config) error {
	cfg.Name = "audit"
	if err := CreateMonths(ctx, cfg.Pool, time.Now()); err != nil {
		return err
	}
	return consume.RunBatch(ctx, cfg, func(ctx context.Context, tx pgx.Tx, events []consume.Event) error {
		var b pgx.Batch
		for _, e := range events {
			var c struct{ Before, After json.RawMessage }
			if err := json.Unmarshal(e.Payload, &c); err != nil {
				return fmt.Errorf("read event %s: %w", e.ID, err)
			}
			b.Queue(`INSERT INTO audit_log (at, event_id, event_type, tenant_id, order_id, before, after)
				VALUES ($1, $2, $3, $4, $5, $6, $7)`,
				e.StoredAt, e.ID, e.Type, e.TenantID, e.AggregateID, c.Before, c.After)
		}
		return tx.SendBatch(ctx, &b).Close()
	})
}

// CreateMonths creates the partitions of audit_log for the month of a time, the one before and the one behind
// it. A service that runs for long calls it every day.
func CreateMonths(ctx context.Context, pool *pgxpool.Pool, at time.Time) error {
	first := time.Date(at.UTC().Year(), at.UTC().Month(), 1, 0, 0, 0, 0, time.UTC)
	for n := range 3 {
		from, to := first.AddDate(0, n-1, 0), first.AddDate(0, n, 0)
		_, err := pool.Exec(ctx, fmt.Sprintf(`CREATE TABLE IF NOT EXISTS audit_log_%s PARTITION OF audit_log
			FOR VALUES FROM ('%s') TO ('%s')`,
			from.Format("2006_01"), from.Format(time.RFC3339), to.Format(time.RFC3339)))
		if err != nil {
			return fmt.Errorf("create the audit log's month %s: %w", from.Format("2006-01"), err)
		}
	}
	return nil
}
