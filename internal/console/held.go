package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/status"
	"github.com/walpost/walpost/internal/table"
)

const mostWaiting = 1000

type heldAnswer struct {
	// Total is how many aggregates there are among the rows that were looked at.
	Total      int               `json:"total"`
	Limited    bool              `json:"limit_reached"`
	Aggregates []aggregateAnswer `json:"aggregates"`
}

type aggregateAnswer struct {
	Outbox        string     `json:"outbox"`
	TenantID      *string    `json:"tenant_id"`
	AggregateType *string    `json:"aggregate_type"`
	AggregateID   *string    `json:"aggregate_id"`
	Rows          int        `json:"rows"`
	ParkedID      *string    `json:"parked_id"`
	EventType     *string    `json:"event_type"`
	Since         *time.Time `json:"since"`
	Attempts      int        `json:"attempts"`
	RetryAt       *time.Time `json:"retry_at"`
	Error         string     `json:"error"`
}

// held are the aggregates whose rows wait, those with the most rows first.
func (c *Console) held(_ http.ResponseWriter, r *http.Request) (any, error) {
	limit, err := number(r, "limit", 200, 1, mostWaiting)
	if err != nil {
		return nil, err
	}
	key := fmt.Sprint("held ", limit)
	return c.once(r.Context(), key, keepAnswer, func(ctx context.Context) (any, error) {
		a := &heldAnswer{Aggregates: []aggregateAnswer{}}
		err := c.servers.postgres(ctx, func(db *table.DB) error { return c.readHeld(ctx, db, int(limit), a) })
		return a, err
	})
}

func (c *Console) readHeld(ctx context.Context, db *table.DB, limit int, a *heldAnswer) error {
	for _, t := range c.servers.tables() {
		if !table.MarkOf(t).InTable() {
			continue
		}
		err := db.Complete(ctx, t)
		if err == nil {
			var some []table.Waiting
			var total int
			var more bool
			some, total, more, err = db.Waiting(ctx, t, status.CountMost, limit)
			a.Total, a.Limited = a.Total+total, a.Limited || more
			for _, w := range some {
				a.Aggregates = append(a.Aggregates, aggregateAnswer(w))
			}
		}
		if err != nil {
			return db.ExplainRead(ctx, t, err)
		}
	}
	slices.SortStableFunc(a.Aggregates, func(x, y aggregateAnswer) int { return cmp.Compare(y.Rows, x.Rows) })
	a.Aggregates = a.Aggregates[:min(len(a.Aggregates), limit)]
	return nil
}
