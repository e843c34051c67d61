package shop

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/consume"
)

// projected are a batch's events of one type.
type projected struct {
	events int
	last   consume.Event
}

// ReadModel keeps order_view until ctx is done: one row for each order, and how far it is by event type.
func ReadModel(ctx context.Context, cfg consume.Config) error {
	cfg.Name = "read-model"
	return consume.RunBatch(ctx, cfg, func(ctx context.Context, tx pgx.Tx, events []consume.Event) error {
		var b pgx.Batch
		status := map[string]projected{}
		for _, e := range events {
			var c Change
			if err := json.Unmarshal(e.Payload, &c); err != nil {
				return fmt.Errorf("read event %s: %w", e.ID, err)
			}
			o := c.After
			// The upsert is idempotent: the model can be filled again with `walpost consumers rewind
			// --reapply`.
			b.Queue(`INSERT INTO order_view AS v (tenant_id, public_id, total, state, version)
				VALUES ($1, $2, $3, $4, $5)
				ON CONFLICT (tenant_id, public_id) DO UPDATE
				SET total = excluded.total, state = excluded.state, version = excluded.version
				WHERE v.version < excluded.version`, e.TenantID, o.PublicID, o.Total, o.State, o.Version)
			b.Queue(`INSERT INTO order_view_log (public_id, version) VALUES ($1, $2)`, o.PublicID, o.Version)
			status[e.Type] = projected{status[e.Type].events + 1, e}
		}
		// Every partition writes these rows. They come last, because a transaction holds them until it ends,
		// and in one order: two transactions would wait for each other otherwise.
		for _, eventType := range slices.Sorted(maps.Keys(status)) {
			s := status[eventType]
			b.Queue(`INSERT INTO projection_status AS s
					(event_type, events, last_event_id, last_event_at, projected_at)
				VALUES ($1, $2, $3, $4, clock_timestamp())
				ON CONFLICT (event_type) DO UPDATE
				SET events = s.events + excluded.events, last_event_id = excluded.last_event_id,
					last_event_at = excluded.last_event_at, projected_at = excluded.projected_at`,
				eventType, s.events, s.last.ID, s.last.StoredAt)
		}
		return tx.SendBatch(ctx, &b).Close()
	})
}
