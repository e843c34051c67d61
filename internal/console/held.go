package console

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/status"
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
	Aggregates []heldAggregate `json:"aggregates"`
}

type heldAggregate struct {
	table.Waiting
	// WhatHelps is [deadletter.Cure] of the parked row: its tries alone do not help.
	WhatHelps string `json:"what_helps"`
}

func heldOf(w table.Waiting) heldAggregate {
	a := heldAggregate{Waiting: w}
	if cure := deadletter.Cure(deadletter.Class(w.Error)); cure != "" && w.ParkedID != nil {
		a.WhatHelps = cure + " when it is a dead letter"
	}
	return a
}

// held are the aggregates whose rows wait, those with the most rows first.
func (c *Console) held(_ http.ResponseWriter, r *http.Request) (any, error) {
	limit, err := number(r, "limit", 200, 1, mostWaiting)
	if err != nil {
		return nil, err
	}
	key := fmt.Sprint("held ", limit)
	return c.once(r.Context(), key, keepAnswer, func(ctx context.Context) (any, error) {
		a := &heldAnswer{Aggregates: []heldAggregate{}}
		err := c.servers.postgres(ctx, func(db *table.DB) error {
			some, total, more, err := db.AllWaiting(ctx, c.servers.tables(), mostHeldRows, int(limit))
			for _, w := range some {
				a.Aggregates = append(a.Aggregates, heldOf(w))
			}
			a.Total, a.Limited = total, more
			return err
		})
		return a, err
	})
}

const (
	// causeRows are looked at for the error of a parked row.
	causeRows = 100
	keepCause = 5 * time.Second
)

// parkedError is the error of a parked row among the first ones, "" where none is found: the page then shows
// the counts alone.
func (c *Console) parkedError(ctx context.Context, r *status.Report) string {
	has := func(o *status.Outbox) bool { return o.Parked != nil && *o.Parked > 0 }
	if !slices.ContainsFunc(r.Outboxes, has) {
		return ""
	}
	value, err := c.once(ctx, "parked error", keepCause, func(ctx context.Context) (any, error) {
		found := ""
		err := c.servers.postgres(ctx, func(db *table.DB) error {
			some, _, _, err := db.AllWaiting(ctx, c.servers.tables(), causeRows, causeRows)
			parked := func(w table.Waiting) bool { return w.ParkedID != nil }
			if i := slices.IndexFunc(some, parked); i >= 0 {
				found = hint.OneLine(some[i].Error)
			}
			return err
		})
		return found, err
	})
	if err != nil {
		return ""
	}
	return value.(string)
}
