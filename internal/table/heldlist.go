package table

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Waiting is an aggregate with recorded rows: a parked one, and those that are held behind it. Rows that
// belong to no aggregate stand alone. Texts are cut. nil is NULL, or not known.
type Waiting struct {
	Outbox        string  `json:"outbox"`
	TenantID      *string `json:"tenant_id"`
	AggregateType *string `json:"aggregate_type"`
	AggregateID   *string `json:"aggregate_id"`
	Rows          int     `json:"rows"`
	// ParkedID is the id of a parked row; nil where all are held. What follows is of that row, or of a held
	// one.
	ParkedID  *string    `json:"parked_id"`
	EventType *string    `json:"event_type"`
	Since     *time.Time `json:"since"` // occurred_at
	Attempts  int        `json:"attempts"`
	RetryAt   *time.Time `json:"retry_at"`
	Error     string     `json:"error"`
}

const (
	// waitingChars bounds, in characters, what is read of a name.
	waitingChars = 256
	waitingError = 4096
)

// Waiting lists the aggregates with recorded rows, those with the most rows first, up to a limit. It looks at
// some recorded rows at most, and at fewer where that takes too long: more says that there are others. total
// is how many aggregates those rows have.
func (db *DB) Waiting(
	ctx context.Context, t *outbox.Table, rows, limit int,
) (all []Waiting, total int, more bool, err error) {
	if !t.Layout.Records() {
		return nil, 0, false, nil
	}
	for ; ; rows /= 10 {
		all, total, more, err = db.waiting(ctx, t, rows, limit)
		if !TooLong(err) || rows < 10 {
			return all, total, more, err
		}
	}
}

// waiting is [DB.Waiting] with one statement.
func (db *DB) waiting(
	ctx context.Context, t *outbox.Table, rows, limit int,
) (all []Waiting, total int, more bool, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		result, _ := conn.Query(ctx, waitingSQL(t, rows, limit))
		var seen int
		var tenant, kind, id, parked, eventType, since, retry, failure *string
		var count, attempts int
		_, err := pgx.ForEachRow(result, []any{
			&seen, &total, &count, &parked, &tenant, &kind, &id, &eventType,
			&since, &attempts, &retry, &failure,
		}, func() error {
			w := Waiting{
				Outbox: t.String(), TenantID: tenant, AggregateType: kind, AggregateID: id,
				Rows: count, ParkedID: parked, EventType: eventType, Since: timeOf(since),
				Attempts: attempts, RetryAt: timeOf(retry),
			}
			if failure != nil {
				w.setError(*failure)
			}
			all, more = append(all, w), seen >= rows
			return nil
		})
		return err
	})
	if err != nil {
		return nil, 0, false, fmt.Errorf("list aggregates of %s that wait: %w", t, err)
	}
	return all, total, more, nil
}

// AllWaiting lists what waits in some outboxes, as [DB.Waiting] does of one.
func (db *DB) AllWaiting(
	ctx context.Context, tables []*outbox.Table, rows, limit int,
) (all []Waiting, total int, more bool, err error) {
	for _, t := range tables {
		err := db.Bind(ctx, t)
		if err == nil {
			err = db.Complete(ctx, t)
		}
		var some []Waiting
		var n int
		var others bool
		if err == nil {
			some, n, others, err = db.Waiting(ctx, t, rows, limit)
		}
		if err != nil {
			return nil, 0, false, db.ExplainRead(ctx, t, err)
		}
		all, total, more = append(all, some...), total+n, more || others
	}
	slices.SortStableFunc(all, func(x, y Waiting) int { return cmp.Compare(y.Rows, x.Rows) })
	return all[:min(len(all), limit)], total, more, nil
}

// setError takes the time of the next try out of a failure, where the layout keeps it there.
func (w *Waiting) setError(failure string) {
	w.Error = failure
	rest, isTime := strings.CutPrefix(failure, retryAfter)
	if at, reason, ok := strings.Cut(rest, ": "); isTime && ok && len(at) == retryBytes {
		if t, err := time.Parse(time.RFC3339Nano, at); err == nil {
			w.RetryAt, w.Error = &t, reason
		}
	}
}

// timeOf reads a time as the server renders it, with or without a zone.
func timeOf(text *string) *time.Time {
	if text == nil {
		return nil
	}
	const form = "2006-01-02 15:04:05.999999"
	for _, form := range []string{form + "-07", form, time.DateOnly} {
		if at, err := time.Parse(form, *text); err == nil {
			at = at.UTC()
			return &at
		}
	}
	return nil
}

// waitingSQL groups the recorded rows by the hash of their aggregates, and reads one parked row of each
// group. It finds them by the index of recorded rows.
func waitingSQL(t *outbox.Table, rows, limit int) string {
	id := "t." + t.Column(outbox.ID)
	group := "concat(" + id + ")"
	if hash := t.AggregateHashSQL("t"); hash != "" {
		group = fmt.Sprintf("CASE WHEN t.%s IS NULL THEN concat(%s) ELSE concat('#', %s) END",
			t.Column(outbox.AggregateID), id, hash)
	}
	text := func(f outbox.Field, most int) string {
		if !t.Layout.Has(f) {
			return "NULL"
		}
		return fmt.Sprintf("CASE WHEN num_nulls(t.%[1]s) = 0 THEN left(concat(t.%[1]s), %[2]d) END",
			t.Column(f), most)
	}
	shown := []string{
		text(outbox.TenantID, waitingChars), text(outbox.AggregateType, waitingChars),
		text(outbox.AggregateID, waitingChars), text(outbox.EventType, waitingChars),
		text(outbox.OccurredAt, 64), fmt.Sprintf("coalesce(t.%s, 0)::int", t.Column(outbox.Attempts)),
		text(outbox.AvailableAt, 64), text(outbox.LastError, waitingError),
	}
	return strings.NewReplacer(
		"{id}", id, "{group}", group, "{held}", heldIs(t, "t"), "{from}", sourceOf(t).pending,
		"{recorded}", recordedSQL(t), "{rows}", fmt.Sprint(rows), "{limit}", fmt.Sprint(limit),
		"{shown}", strings.Join(shown, ", "),
	).Replace(`
WITH r AS MATERIALIZED (
	SELECT {id} AS id, {group} AS name, coalesce({held}, false) AS held
	FROM {from} t WHERE {recorded} LIMIT {rows}
), a AS MATERIALIZED (
	SELECT count(*)::int AS rows, (array_agg(r.id ORDER BY r.held, r.id))[1] AS first,
		bool_and(r.held) AS allheld
	FROM r GROUP BY r.name
)
SELECT (SELECT count(*)::int FROM r), (SELECT count(*)::int FROM a), x.rows,
	CASE WHEN NOT x.allheld THEN left(concat(x.first), 256) END, s.*
FROM (SELECT * FROM a ORDER BY a.rows DESC, a.first LIMIT {limit}) x,
	LATERAL (SELECT {shown} FROM {from} t WHERE {id} = x.first AND {recorded} LIMIT 1) s
ORDER BY x.rows DESC, x.first`)
}
