package retention

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/walpost/walpost/internal/pg"
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
	// id, where it is set, is the quoted column by which refused is told of a row that makes
	// its statement fail. The condition that ahead returns then leaves it out.
	id      string
	refused func(id string, err error) error
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
SELECT (SELECT count(*) FROM old), (SELECT max(at)::timestamptz FROM old), (SELECT count(*) FROM gone) WHERE ` + pg.OwnPath)
}

// sweep runs until no row is left that can be taken, ctx is done or a statement
// fails. Each batch begins where the last one ended: the rows before it are gone,
// but as long as some transaction may still see them their index entries are not,
// and to walk over them again and again would make the work quadratic.
//
// Where a row is refused, batches become smaller until it is alone, and go on behind it.
func (r *pass) sweep(ctx context.Context, s sweep) error {
	rows := sweepFirst
	from := pgtype.Timestamptz{InfinityModifier: pgtype.NegativeInfinity, Valid: true}
	for {
		start := time.Now()
		only := ""
		if s.ahead != nil {
			var err error
			if only, err = s.ahead(ctx, from, rows); err != nil {
				return err
			}
		}
		found, gone, err := r.take(ctx, &s, only, &from, rows)
		if err == nil {
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
		} else if !refusesRow(err) || s.refused == nil {
			return err
		} else if rows == 1 {
			if err := r.refuse(ctx, &s, only, from); err != nil {
				return err
			}
		}
		took := time.Since(start)
		if rows = nextBatch(rows, took); err != nil {
			rows = max(rows/4, 1)
		}
		if err := pause(ctx, took); err != nil {
			return err
		}
	}
}

// take moves from to the last row that it has found.
func (r *pass) take(ctx context.Context, s *sweep, only string, from *pgtype.Timestamptz, rows int) (found, gone int64, err error) {
	last := *from
	err = r.db.QueryRow(ctx, []any{&found, &last, &gone}, s.sql(only), s.before, *from, rows)
	if err == nil {
		*from = last
	}
	return found, gone, err
}

// refuse takes the next row by its id. Which one a batch of one row has met is not known:
// somebody may have had others locked.
func (r *pass) refuse(ctx context.Context, s *sweep, only string, from pgtype.Timestamptz) error {
	var id string
	err := r.db.QueryRow(ctx, []any{&id}, strings.NewReplacer("{from}", s.from, "{column}", s.column, "{id}", s.id, "{only}", only).Replace(
		`SELECT concat(t.{id}) FROM {from} t WHERE t.{column} < $1::timestamptz AND t.{column} >= $2::timestamptz{only}
		ORDER BY t.{column} LIMIT 1 FOR UPDATE SKIP LOCKED`), s.before, from)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	_, gone, err := r.take(ctx, s, only+fmt.Sprintf(" AND concat(t.%s) = %s", s.id, pg.QuoteLiteral(id)), &from, 1)
	*s.count += gone
	if err != nil && refusesRow(err) {
		return s.refused(id, err)
	}
	return err
}

// refusesRow reports whether a statement failed for what one of its rows is: a value, a
// constraint, a trigger, a limit.
func refusesRow(err error) bool {
	return pg.InClass(err, pg.DataException, pg.IntegrityConstraintViolation, pg.WithCheckOptionViolation,
		pg.ProgramLimitExceeded, pg.PLpgSQLError)
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
