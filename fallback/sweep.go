package fallback

import (
	"context"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgtype"
)

// Batches grow to sweepRows while they are quick, and shrink while they are slow:
// rows may be large. The first is small, because nothing is known of them.
const (
	sweepFirst = 16
	sweepRows  = 1000
	sweepQuick = 100 * time.Millisecond
	sweepSlow  = 250 * time.Millisecond
)

// sweep takes the rows out of a table whose time lies before a moment, oldest
// first, and passes over those that somebody has locked.
type sweep struct {
	from   string // the table, quoted
	column string // the time, quoted; the first column of an index
	before time.Time
	into   string // nothing, or a CTE after a comma that keeps the rows of "gone"
	count  *int64 // is told of each row
	// ahead, where it is set, is called before each batch with the time where the
	// batch begins. It returns a condition over t for the rows that can go, or
	// nothing.
	ahead func(ctx context.Context, from pgtype.Timestamptz, rows int) (only string, err error)
}

// sql repeats the condition in the DELETE, which so cannot take a row that does
// not meet it: partitions of an outbox each have their own ctids.
func (s *sweep) sql(only string) string {
	return strings.NewReplacer("{from}", s.from, "{column}", s.column, "{into}", s.into, "{only}", only).Replace(`
WITH old AS MATERIALIZED (
	SELECT t.ctid AS place, t.{column} AS at FROM {from} t WHERE t.{column} < $1::timestamptz AND t.{column} >= $2::timestamptz{only}
	ORDER BY t.{column} LIMIT $3 FOR UPDATE SKIP LOCKED
), gone AS (
	DELETE FROM {from} t WHERE t.ctid = ANY (ARRAY(SELECT o.place FROM old o)) AND t.{column} < $1::timestamptz RETURNING t.*
){into}
SELECT (SELECT count(*) FROM old), (SELECT max(at)::timestamptz FROM old), (SELECT count(*) FROM gone)`)
}

// sweep runs until no row is left that can be taken, ctx is done or a statement
// fails. Each batch begins where the last one ended: the rows before it are gone,
// but as long as some transaction may still see them their index entries are not,
// and to walk over them again and again would make the work quadratic.
func (r *retention) sweep(ctx context.Context, s sweep) error {
	sql, rows := s.sql(""), sweepFirst
	from := pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	for {
		start := time.Now()
		if s.ahead != nil {
			only, err := s.ahead(ctx, from, rows)
			if err != nil {
				return err
			}
			sql = s.sql(only)
		}
		var found, gone int64
		if err := r.db.row(ctx, []any{&found, &from, &gone}, sql, s.before, from, rows); err != nil {
			return err
		}
		*s.count += gone
		if r.opts.Progress != nil {
			r.opts.Progress(r.report)
		}
		if found < int64(rows) {
			return nil
		}
		if gone == 0 {
			r.note("rows of %s were found and could not be deleted: does a trigger keep them?", s.from)
			return nil
		}
		took := time.Since(start)
		rows = nextBatch(rows, took)
		if err := pause(ctx, took); err != nil {
			return err
		}
	}
}

func nextBatch(rows int, took time.Duration) int {
	switch {
	case took > sweepSlow:
		return max(rows/2, 1)
	case took < sweepQuick:
		return min(rows*2, sweepRows)
	}
	return rows
}

// pause leaves the server to the others for as long as the batch took.
func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}
