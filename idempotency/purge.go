package idempotency

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/internal/keys"
	"github.com/walpost/walpost/internal/sleep"
)

const purgeRows = 1000

// Purge deletes the keys that have expired, and returns how many. It is for applications without a relay:
// `walpost run` and `walpost retention` do it, too. The table is named as in [Options]; "" is its default.
//
// It skips keys whose requests are being executed. Each batch of at most 1,000 keys is one transaction, and
// after each it pauses for as long as the batch took. Where ctx is done it returns what it has deleted, and
// the context's error. Several may run at the same time.
func Purge(ctx context.Context, pool *pgxpool.Pool, table string) (deleted int64, err error) {
	name, err := quoteTable(table)
	if err != nil {
		return 0, fmt.Errorf("delete expired keys: %w", err)
	}
	p := purge{sql: keys.PurgeSQL(name, "true"), pool: pool}
	p.from = pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	for full := true; full; {
		start := time.Now()
		var n int64
		if n, full, err = p.batch(ctx); err != nil {
			return deleted, fmt.Errorf("delete expired keys: %w", err)
		}
		deleted += n
		if full && !sleep.For(ctx, time.Since(start)) {
			return deleted, fmt.Errorf("delete expired keys: %w", ctx.Err())
		}
	}
	return deleted, nil
}

// purge is one call. Each batch begins at the expiry where the last one ended.
type purge struct {
	sql  string
	pool *pgxpool.Pool
	from pgtype.Timestamptz
	now  time.Time // the server's, of the first batch
}

// batch reports whether there may be more to delete.
func (p *purge) batch(ctx context.Context) (deleted int64, more bool, err error) {
	opts := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	err = pgx.BeginTxFunc(ctx, p.pool, opts, func(tx pgx.Tx) error {
		if p.now.IsZero() {
			if err := tx.QueryRow(ctx, `SELECT now()`).Scan(&p.now); err != nil {
				return err
			}
		}
		var found int64
		last := p.from
		result := tx.QueryRow(ctx, p.sql, p.now, p.from, purgeRows)
		if err := result.Scan(&found, &last, &deleted); err != nil {
			return err
		}
		if more = found == purgeRows && deleted > 0; more {
			p.from = last
		}
		return nil
	})
	return deleted, more, err
}
