package shop

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/consume"
)

// Payment has each placed order paid by a provider, an HTTP service, until ctx is done. The call is no part
// of a transaction: a short one before it records what is asked for, a short one after it the result. The
// provider recognizes a repeated call by its key.
func Payment(ctx context.Context, cfg consume.Config, provider string) error {
	cfg.Name, cfg.Filters = "payment", []string{"events.order.placed"}
	pool := cfg.Pool
	return consume.RunExternal(ctx, cfg, func(ctx context.Context, e consume.Event) error {
		var c Change
		if err := json.Unmarshal(e.Payload, &c); err != nil {
			return fmt.Errorf("read event %s: %w", e.ID, err)
		}
		_, err := pool.Exec(ctx, `INSERT INTO payments (order_id, key, amount) VALUES ($1, $2, $3)
			ON CONFLICT DO NOTHING`, c.After.ID, e.Source+"/"+e.ID, c.After.Total)
		if err != nil {
			return fmt.Errorf("record payment: %w", err)
		}
		if err := charge(ctx, provider, e.Source+"/"+e.ID, c.After.Total); err != nil {
			return err
		}
		return paid(ctx, pool, c.After.ID)
	})
}

// charge is the call. Its key is the event's: the provider charges it once.
func charge(ctx context.Context, provider, key string, amount int) error {
	body := bytes.NewReader(fmt.Appendf(nil, `{"amount": %d}`, amount))
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, provider+"/charges", body)
	if err != nil {
		return err
	}
	r.Header.Set("Idempotency-Key", key)
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return fmt.Errorf("charge: %w", err)
	}
	defer response.Body.Close() //nolint:errcheck // nothing of it is read
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("charge: the provider answers %s", response.Status)
	}
	return nil
}

// paid records the result, and changes the order once.
func paid(ctx context.Context, pool *pgxpool.Pool, order int64) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		done, err := tx.Exec(ctx, `UPDATE payments SET state = 'paid'
			WHERE order_id = $1 AND state = 'pending'`, order)
		if err != nil || done.RowsAffected() == 0 {
			return err
		}
		before, err := lock(ctx, tx, `id = $1`, order)
		if err != nil {
			return err
		}
		after := *before
		after.State = "paid"
		_, err = update(ctx, tx, "order.paid", before, after)
		return err
	})
}
