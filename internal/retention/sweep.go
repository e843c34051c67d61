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

// Batches grow to sweepRows while they are quick, and shrink while they are slow: rows may be large. The
// first is small, because the size of the rows is not known yet.
const (
	sweepFirst = 16
	sweepRows  = 1000
	sweepQuick = 100 * time.Millisecond
	sweepSlow  = 250 * time.Millisecond
)

// sweep deletes the rows of a table whose time lies before a moment, oldest first. It skips locked rows.
type sweep struct {
	from   string // the table, quoted
	column string // the time, quoted; the first column of an index
	before time.Time
	into   string // "", or a comma and a CTE that keeps the rows of "gone"
	count  *int64 // grows by each deleted row
	// ahead may be nil. It is called before each batch with the time where the batch begins, and returns a
	// condition over t for the rows that may go, or "".
	ahead func(ctx context.Context, from pgtype.Timestamptz, rows int) (only string, err error)
	// batch may be empty. It is a statement in place of the one below, with the same parameters and results.
	batch string
	// refused may be nil. It is called with the id of a row that makes its statement fail; the condition that
	// ahead returns then leaves the row out. An error ends the sweep.
	refused func(id string, err error) error
	id      string // the column for refused, quoted
}

// batchSQL deletes one batch. The DELETE repeats the condition, because rows of two partitions may have the
// same ctid.
func (s *sweep) batchSQL(only string) string {
	if s.batch != "" {
		return s.batch
	}
	return s.fill(only, `
WITH old AS MATERIALIZED (
	SELECT t.ctid AS place, t.{column} AS at FROM {from} t
	WHERE t.{column} < $1::timestamptz AND t.{column} >= $2::timestamptz{only}
	ORDER BY t.{column} LIMIT $3 FOR UPDATE SKIP LOCKED
), gone AS (
	DELETE FROM {from} t
	WHERE t.ctid = ANY (ARRAY(SELECT o.place FROM old o)) AND t.{column} < $1::timestamptz{only} RETURNING t.*
){into}
SELECT (SELECT count(*) FROM old), (SELECT max(at)::timestamptz FROM old), (SELECT count(*) FROM gone)
WHERE `+pg.OwnPath)
}

// nextIDSQL reads the id of the next row.
func (s *sweep) nextIDSQL(only string) string {
	return s.fill(only, `
SELECT concat(t.{id}) FROM {from} t
WHERE t.{column} < $1::timestamptz AND t.{column} >= $2::timestamptz{only}
ORDER BY t.{column} LIMIT 1 FOR UPDATE SKIP LOCKED`)
}

func (s *sweep) fill(only, sql string) string {
	return strings.NewReplacer("{from}", s.from, "{column}", s.column, "{into}", s.into, "{id}", s.id,
		"{only}", only).Replace(sql)
}

// sweep runs until no row is left that it can take, ctx is done or a statement fails. Each batch begins where
// the last one ended. While some transaction may still see the deleted rows, their index entries remain: to
// read them in every batch would make the work quadratic.
//
// Where a row is refused, batches become smaller until the row is alone. The sweep goes on behind it.
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

// take deletes one batch, and moves *from to the time of the last row that it found.
func (r *pass) take(
	ctx context.Context, s *sweep, only string, from *pgtype.Timestamptz, rows int,
) (found, gone int64, err error) {
	last := *from
	err = r.db.QueryRow(ctx, []any{&found, &last, &gone}, s.batchSQL(only), s.before, *from, rows)
	if err == nil {
		*from = last
	}
	return found, gone, err
}

// refuse takes the next row by its id. A failed batch of one row does not tell which row it met: it may have
// skipped locked ones.
func (r *pass) refuse(ctx context.Context, s *sweep, only string, from pgtype.Timestamptz) error {
	var id string
	err := r.db.QueryRow(ctx, []any{&id}, s.nextIDSQL(only), s.before, from)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	this := fmt.Sprintf(" AND concat(t.%s) = %s", s.id, pg.QuoteLiteral(id))
	_, gone, err := r.take(ctx, s, only+this, &from, 1)
	*s.count += gone
	if err != nil && refusesRow(err) {
		return s.refused(id, err)
	}
	return err
}

// refusesRow reports whether one row made the statement fail: a value, a constraint, a trigger, a limit.
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

// pause leaves the server to its other clients for as long as the batch took.
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
