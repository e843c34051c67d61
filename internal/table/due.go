package table

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/walpost/walpost/outbox"
)

// Moment is a point in the time of a server: xid is greater than that of every transaction that had written
// anything by then.
type Moment struct {
	xid int64
	at  time.Time
}

// NewMoment is now.
func (db *DB) NewMoment(ctx context.Context) (m Moment, err error) {
	err = db.QueryRow(ctx, []any{&m.xid, &m.at},
		`SELECT pg_current_xact_id()::text::bigint, clock_timestamp()`)
	if err != nil {
		return m, fmt.Errorf("take a transaction id: %w", err)
	}
	return m, nil
}

// DueBefore tells a row that was committed before a moment, and can be delivered since then: it is pending,
// due and not recorded, or it is a recorded row that might be tried at the moment and was not tried since. It
// is "" where there is none. hold is that of [DB.Recorded].
func (db *DB) DueBefore(
	ctx context.Context, t *outbox.Table, threshold time.Duration, hold bool, m Moment,
) (left string, err error) {
	err = db.QueryRow(ctx, []any{&left}, "SELECT "+freshBeforeSQL(t, threshold, db.own.deadLetters), m.xid)
	if err == nil && left == "" && t.Layout.Records() {
		err = db.recordedParts.of(t).run(recordedHash(t), func(where string) (bool, error) {
			sql := fmt.Sprintf("SELECT coalesce((SELECT concat('row ', l.id) FROM (%s) l LIMIT 1), '')",
				recordedListSQL(t, hold, "$1::timestamptz", where))
			err := db.QueryRow(ctx, []any{&left}, sql, m.at)
			return left != "", err
		})
	}
	if err != nil {
		return "", fmt.Errorf("look for due rows of %s: %w", t, err)
	}
	return left, nil
}

// freshBeforeSQL names a row that is pending, due, not recorded and not kept, and that a transaction with an
// id below $1 has written, or gives an empty text.
func freshBeforeSQL(t *outbox.Table, threshold time.Duration, letters string) string {
	var halves []string
	for _, half := range freshHalves(t, threshold) {
		halves = append(halves, fmt.Sprintf(`
			(SELECT concat('row ', t.%s) FROM %s t WHERE %s
				AND age(t.xmin) > pg_snapshot_xmax(pg_current_snapshot())::text::bigint - $1
				AND %s LIMIT 1)`,
			t.Column(outbox.ID), sourceOf(t).pending, freshWhere(t, threshold, half), unkeptSQL(t, letters)))
	}
	return "coalesce(" + strings.Join(halves, ",") + ", '')"
}

// recordedListSQL lists the recorded rows that may be tried at a time, of those that where is true of: see
// [DB.Recorded].
func recordedListSQL(t *outbox.Table, hold bool, at, where string) string {
	ready := readyIs(t, "t", at)
	if by := partitionSQL(t); hold && by != "" {
		ready = fmt.Sprintf("CASE WHEN t.%s IS NULL THEN %s "+
			"ELSE bool_and(%[2]s) OVER (PARTITION BY %s ORDER BY %s) END",
			t.Column(outbox.AggregateID), ready, by, orderSQL(t, "t"))
	}
	return fmt.Sprintf(`SELECT id, %s, true, false, attempts, false, bytes
		FROM (SELECT t.%s AS id, %s, coalesce(t.%s, 0) AS attempts, %s AS ready, %s AS bytes, %s AS at
			FROM %s t WHERE %s%s) x WHERE ready`,
		columnsNameSQL(t), t.Column(outbox.ID), aggregateSQL(t), t.Column(outbox.Attempts),
		ready, bytesSQL(t), atSQL(t, "t"), sourceOf(t).pending, recordedSQL(t), where)
}

// DelayedCount counts the rows without a record that fall due later, up to a limit.
func (db *DB) DelayedCount(ctx context.Context, t *outbox.Table, limit int) (n int, err error) {
	if !t.Layout.Has(outbox.AvailableAt) {
		return 0, nil
	}
	err = db.QueryRow(ctx, []any{&n}, fmt.Sprintf(
		`SELECT count(*)::int FROM (SELECT FROM %s t WHERE %s AND %s AND t.%s > now() LIMIT %d) d`,
		sourceOf(t).pending, PendingSQL(t, "t"), unrecordedIs(t, "t"), t.Column(outbox.AvailableAt), limit))
	if err != nil {
		return 0, fmt.Errorf("count delayed rows of %s: %w", t, err)
	}
	return n, nil
}
