package console

import (
	"context"
	"fmt"
	"net/http"

	"github.com/walpost/walpost/internal/table"
)

const (
	mostWaiting = 1000
	// mostHeldRows are looked at. Grouping five times as many takes longer than a question may where the
	// server is busy.
	mostHeldRows = 20_000
)

type heldAnswer struct {
	// Total is how many aggregates there are among the rows that were looked at.
	Total      int             `json:"total"`
	Limited    bool            `json:"limit_reached"`
	Aggregates []table.Waiting `json:"aggregates"`
}

// held are the aggregates whose rows wait, those with the most rows first.
func (c *Console) held(_ http.ResponseWriter, r *http.Request) (any, error) {
	limit, err := number(r, "limit", 200, 1, mostWaiting)
	if err != nil {
		return nil, err
	}
	key := fmt.Sprint("held ", limit)
	return c.once(r.Context(), key, keepAnswer, func(ctx context.Context) (any, error) {
		a := &heldAnswer{Aggregates: []table.Waiting{}}
		err := c.servers.postgres(ctx, func(db *table.DB) error {
			some, total, more, err := db.AllWaiting(ctx, c.servers.tables(), mostHeldRows, int(limit))
			if err == nil {
				a.Aggregates, a.Total, a.Limited = append(a.Aggregates, some...), total, more
			}
			return err
		})
		return a, err
	})
}
