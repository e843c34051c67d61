package outbox_test

import (
	"context"
	"encoding/json"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// The event commits or vanishes with the change that it tells of.
func ExampleInsert() {
	confirm := func(ctx context.Context, conn *pgx.Conn, order int64) error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "UPDATE orders SET state = 'confirmed' WHERE id = $1", order); err != nil {
				return err
			}
			payload, err := json.Marshal(map[string]any{"order": order})
			if err != nil {
				return err
			}
			_, err = outbox.Insert(ctx, tx, outbox.Message{
				AggregateType: "order",
				AggregateID:   order,
				EventType:     "order.confirmed",
				Payload:       payload,
			})
			return err
		})
	}
	_ = confirm
}
