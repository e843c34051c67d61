package consumers

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
)

// Parked is an event that was not handled: a dead letter, or one that is tried again.
type Parked struct {
	Number      int64      `json:"number"`
	Consumer    string     `json:"consumer"`
	Sequence    uint64     `json:"sequence"`
	Source      string     `json:"source"`
	ID          string     `json:"id"`
	Type        string     `json:"event_type"`
	Attempts    int        `json:"attempts"`
	LastError   *string    `json:"last_error"`
	ParkedAt    time.Time  `json:"parked_at"`
	NextAttempt time.Time  `json:"next_attempt_at"`
	DeadAt      *time.Time `json:"dead_at"`
	// Event is all of it, as consume.Event. Only Show reads it.
	Event json.RawMessage `json:"event,omitempty"`
}

// Filter chooses parked events. Without a number and a consumer it chooses all.
type Filter struct {
	Numbers  []int64
	Consumer string
	// DeadOnly leaves out those that are tried again.
	DeadOnly bool
	Limit    int // 0 is none
}

const chosenSQL = ` WHERE ($1::bigint[] IS NULL OR k.number = ANY ($1::bigint[]))
	AND ($2::text = '' OR k.consumer_name = $2::text) AND (NOT $3::boolean OR k.dead_at IS NOT NULL)`

func (f Filter) args() []any { return []any{f.Numbers, f.Consumer, f.DeadOnly} }

const parkedSQL = `SELECT k.number, k.consumer_name, k.sequence, k.event_source, k.event_id, k.event_type,
		k.attempts, k.last_error, k.parked_at, k.next_attempt_at, k.dead_at,
		CASE WHEN $5::boolean THEN k.event END
	FROM {schema}.consumer_parked k`

// Parked calls each with the chosen events, oldest first.
func (t *Tables) Parked(ctx context.Context, f Filter, whole bool, each func(Parked) error) error {
	limit := any(nil)
	if f.Limit > 0 {
		limit = f.Limit
	}
	rows, err := t.conn.Query(ctx, t.sql(parkedSQL)+chosenSQL+` ORDER BY k.number LIMIT $4::bigint`,
		append(f.args(), limit, whole)...)
	if err != nil {
		return t.explain(err, "list parked events")
	}
	var p Parked
	var event []byte
	fields := []any{
		&p.Number, &p.Consumer, &p.Sequence, &p.Source, &p.ID, &p.Type, &p.Attempts,
		&p.LastError, &p.ParkedAt, &p.NextAttempt, &p.DeadAt, &event,
	}
	_, err = pgx.ForEachRow(rows, fields, func() error {
		p.Event = event
		return each(p)
	})
	if err != nil {
		return t.explain(err, "list parked events")
	}
	return nil
}

// Show reads one event whole.
func (t *Tables) Show(ctx context.Context, number int64) (*Parked, error) {
	var found *Parked
	err := t.Parked(ctx, Filter{Numbers: []int64{number}}, true, func(p Parked) error {
		found = &p
		return nil
	})
	if err == nil && found == nil {
		err = hint.Errorf("`walpost consumers dlq list` shows those that are there",
			"there is no parked event %d", number)
	}
	return found, err
}

// Retry makes the chosen events due now: the consumer tries them again, with new attempts. Those that wait
// behind another event of their aggregate still do.
func (t *Tables) Retry(ctx context.Context, f Filter) (int64, error) {
	return t.change(ctx, "retry", `UPDATE {schema}.consumer_parked k
		SET dead_at = NULL, attempts = 0, next_attempt_at = now()`, f)
}

// Discard deletes the chosen events for good. Those that wait behind them are tried then.
func (t *Tables) Discard(ctx context.Context, f Filter) (int64, error) {
	return t.change(ctx, "discard", `DELETE FROM {schema}.consumer_parked k`, f)
}

func (t *Tables) change(ctx context.Context, verb, sql string, f Filter) (int64, error) {
	if len(f.Numbers) == 0 && f.Consumer == "" {
		return 0, fmt.Errorf("%s events: none is chosen", verb)
	}
	tag, err := t.conn.Exec(ctx, t.sql(sql)+chosenSQL, f.args()...)
	if err != nil {
		return 0, t.explain(err, "%s events", verb)
	}
	return tag.RowsAffected(), nil
}
