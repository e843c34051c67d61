package table

import (
	"context"
	"fmt"
	"math"
	"time"

	"github.com/walpost/walpost/outbox"
)

// backlogList is how many ids a [Backlog] keeps. A variable for tests.
var backlogList = 16_384

// Backlog is the set of rows of a table that are pending, due, not recorded and not kept at the first call of
// Left. They are known by their ids: a row that is updated later belongs to it, although its xmin is new.
//
// At most 16,384 ids are kept. If more rows are pending, the next ids are listed when these are answered, in
// the order in which rows are delivered, until as many were listed as were pending. So the wait ends even if
// rows are inserted faster than they are delivered.
type Backlog struct {
	Table *outbox.Table
	// Threshold is that of [DB.Fresh].
	Threshold time.Duration

	counted  bool
	unlisted int      // how many rows the next lists may have
	ids      []string // of the last list, those that are left
}

// Left names a row that is left, or returns "". It can be called again after an error.
func (b *Backlog) Left(ctx context.Context, db *DB) (left string, err error) {
	err = db.Search(ctx, func(ctx context.Context) (err error) {
		left, err = b.left(ctx, db)
		return err
	})
	return left, err
}

func (b *Backlog) left(ctx context.Context, db *DB) (left string, err error) {
	if !b.counted {
		if b.unlisted, err = db.PendingCount(ctx, b.Table, math.MaxInt); err != nil {
			return "", err
		}
		b.counted = true
	}
	for {
		if len(b.ids) > 0 {
			ids, err := db.stillFresh(ctx, b.Table, b.Threshold, b.ids)
			if err != nil {
				return "", err
			}
			if b.ids = ids; len(ids) > 0 {
				return "row " + ids[0], nil
			}
		}
		if b.unlisted <= 0 {
			return "", nil
		}
		listed, err := db.Fresh(ctx, b.Table, b.Threshold, backlogList)
		if err != nil {
			return "", err
		}
		for _, c := range listed {
			b.ids = append(b.ids, c.ID)
		}
		if b.unlisted -= len(listed); len(listed) < backlogList {
			b.unlisted = 0
		}
	}
}

// stillFresh returns those of the rows that are pending, due, not recorded and not kept.
func (db *DB) stillFresh(
	ctx context.Context, t *outbox.Table, threshold time.Duration, ids []string,
) ([]string, error) {
	fresh := freshIs(t, threshold, anyHalf(t, threshold)) + " AND " + unkeptSQL(t, db.own.deadLetters)
	return db.stillPending(ctx, t, ids, " AND "+fresh)
}

// TriableBefore names a recorded row that might be tried at a time and was not tried since, or returns "".
// hold is that of [DB.Recorded].
func (db *DB) TriableBefore(
	ctx context.Context, t *outbox.Table, hold bool, at time.Time,
) (left string, err error) {
	if !t.Layout.Records() {
		return "", nil
	}
	err = db.recordedParts.of(t).run(recordedHash(t), func(where string) (bool, error) {
		sql := fmt.Sprintf("SELECT coalesce((SELECT concat('row ', l.id) FROM (%s) l LIMIT 1), '')",
			recordedListSQL(t, hold, "$1::timestamptz", where))
		err := db.QueryRow(ctx, []any{&left}, sql, at)
		return left != "", err
	})
	if err != nil {
		return "", fmt.Errorf("look for recorded rows of %s: %w", t, err)
	}
	return left, nil
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
