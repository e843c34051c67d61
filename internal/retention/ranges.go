package retention

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// An append-only outbox that is partitioned by its ids has partitions cut ahead of them, and loses the old
// ones as whole tables. The last partition goes to MAXVALUE: no INSERT fails where no pass has run for long.
const (
	// rangesAhead is how many partitions lie ready before the last one.
	rangesAhead = 2
	// rangeTime is the time whose ids a partition holds, at the present rate, if they are more than
	// leastRange. Where rows are to go soon, it is rangeShare of the time after which they do.
	rangeTime  = time.Hour
	rangeShare = 4
	// mostCuts bounds the partitions that one pass cuts.
	mostCuts = 16
	// Producers wait for as long as a statement waits for its lock, which it does so often.
	rangeLock  = 50 * time.Millisecond
	rangeTries = 20
	// Ids that are so many partitions ahead are refused meanwhile.
	refusedAfter = 10
)

// leastRange is how many ids a partition has at least.
var leastRange int64 = 1_000_000

// keepRanges cuts and drops partitions of an outbox. It reports false where the outbox has none by ids: its
// old rows are deleted one by one.
func (r *pass) keepRanges(ctx context.Context, t *outbox.Table) (has bool, err error) {
	p, err := r.readRanges(ctx, t)
	if err != nil || p == nil || len(p.Parts) == 0 {
		return false, err
	}
	if !r.mayAlter(p) {
		return true, nil
	}
	if p.Parts[len(p.Parts)-1].To != math.MaxInt64 {
		r.note("%s has no partition to MAXVALUE, so no partition is cut: "+
			"rows are refused behind the last one", t)
	} else if err := r.cutRanges(ctx, t, p); err != nil {
		return true, fmt.Errorf("cut partitions of %s: %w", t, err)
	}
	if r.opts.DeleteAfter > 0 {
		if err := r.dropRanges(ctx, t, p); err != nil {
			return true, fmt.Errorf("drop partitions of %s: %w", t, err)
		}
	}
	return true, nil
}

func (r *pass) readRanges(ctx context.Context, t *outbox.Table) (*partition.Table, error) {
	return r.readParts(ctx, t.SQL(), t.Layout.Columns[outbox.ID], partition.IDs)
}

// cutRanges makes partitions until enough of them lie between the newest id and the last one.
func (r *pass) cutRanges(ctx context.Context, t *outbox.Table, p *partition.Table) error {
	last := p.Parts[len(p.Parts)-1]
	for range mostCuts {
		newest, size, err := r.nextRange(ctx, t)
		if err != nil {
			return err
		}
		if last.From > newest && last.From-newest > rangesAhead*size {
			return nil
		}
		next, err := r.cut(ctx, t, p, last, newest, size)
		if err != nil {
			return r.settle(err)
		}
		r.report.Created = append(r.report.Created, next.Name)
		last.From = next.To
	}
	return nil
}

// nextRange is the newest id that was drawn, and how many ids a partition is to have.
func (r *pass) nextRange(ctx context.Context, t *outbox.Table) (newest, size int64, err error) {
	const some = 100_000
	var age *float64 // of a row that is so many ids old
	err = r.db.QueryRow(ctx, []any{&newest, &age}, fmt.Sprintf(`
		WITH s AS (
			SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence($1, $2)::regclass), 0) AS last
		)
		SELECT last, (SELECT extract(epoch FROM now() - %s)::float8 FROM %s e WHERE e.%s > last - $3::bigint
			ORDER BY e.%[3]s LIMIT 1) FROM s`, occurredSQL(t), t.SQL(), t.Column(outbox.ID)),
		t.SQL(), t.Layout.Columns[outbox.ID], some)
	if err != nil {
		return 0, 0, err
	}
	size = leastRange
	if age != nil && newest >= some {
		span := rangeTime
		if r.opts.DeleteAfter > 0 {
			span = min(span, r.opts.DeleteAfter/rangeShare)
		}
		ids := some * span.Seconds() / max(*age, 1)
		size = max(size, (int64(ids)/leastRange+1)*leastRange)
	}
	return newest, size, nil
}

// occurredSQL is the time of a row e.
func occurredSQL(t *outbox.Table) string {
	if t.Layout.Has(outbox.OccurredAt) {
		return "e." + t.Column(outbox.OccurredAt)
	}
	return "NULL::timestamptz"
}

// cut makes the partition before the last one: from its part where it is empty, else of all that it has.
func (r *pass) cut(
	ctx context.Context, t *outbox.Table, p *partition.Table, last partition.Part, newest, size int64,
) (partition.Part, error) {
	next := p.Part(last.From, max(last.From, 1)+size)
	err := p.CutEmpty(ctx, r.noting(t), last, next)
	if errors.Is(err, partition.ErrFilled) {
		next = p.Part(last.From, newest+refusedAfter*size+1)
		err = p.CutFilled(ctx, r.noting(t), last, next)
	}
	return next, err
}

// noting is politely for a table of which outbox_known says how far its progress is: a transaction that
// changes the partitions says so there. Else the progress would be void, and the whole table be searched.
func (r *pass) noting(t *outbox.Table) pg.Polite {
	p := r.politely()
	p.Begin = func(ctx context.Context, do func(context.Context, pgx.Tx) error) error {
		return r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
			// Nobody else attaches or detaches a partition from now on.
			if _, err := tx.Exec(ctx, `LOCK TABLE `+t.SQL()+` IN SHARE UPDATE EXCLUSIVE MODE`); err != nil {
				return err
			}
			var may, bound bool
			var before int64
			err := tx.QueryRow(ctx, `SELECT has_table_privilege($1, 'UPDATE'), `+table.BoundSQL(t)+`, `+
				table.PartitionsSQL(t), t.Journal.Known).Scan(&may, &bound, &before)
			if err == nil && !bound {
				err = fmt.Errorf("%w: %s", table.ErrTableChanged, t)
			}
			if err == nil {
				err = do(ctx, tx)
			}
			if err != nil || !may {
				return err
			}
			_, err = tx.Exec(ctx, `UPDATE `+t.Journal.Known+` SET partitions = `+table.PartitionsSQL(t)+`
				WHERE outbox = $1 AND partitions = $2`, t.String(), before)
			return err
		})
	}
	return p
}

// settledSQL is the condition that nothing of a partition is needed: every id in $2 to $3 of outbox $1 is
// done with, under each condition, and was before $4. A progress of other partitions says nothing.
func settledSQL(t *outbox.Table) string {
	return fmt.Sprintf(`(SELECT bool_and(k.settled_to >= $3::bigint - 1
				AND NOT k.holes && int8range($2::bigint, $3::bigint)
				AND k.table_oid = to_regclass(%s) AND k.partitions = %s)
			FROM %s k WHERE k.outbox = $1) IS TRUE AND %s
		AND NOT EXISTS (SELECT FROM %s d WHERE d.outbox = $1 AND d.id >= $2::bigint AND d.id < $3::bigint)
		AND NOT EXISTS (SELECT FROM %s j WHERE j.outbox = $1 AND j.processed_at >= $4::timestamptz
			AND range_merge(j.ids) && int8range($2::bigint, $3::bigint)
			AND j.ids && int8range($2::bigint, $3::bigint))`,
		pg.QuoteLiteral(t.SQL()), table.PartitionsSQL(t), t.Journal.Known, table.BoundSQL(t),
		t.Journal.Deferred, t.Journal.Entries)
}

// dropRanges drops partitions whose rows are delivered and old, the first ones, and then the entries of their
// ids.
func (r *pass) dropRanges(ctx context.Context, t *outbox.Table, of *partition.Table) error {
	before := r.now.Add(-r.opts.DeleteAfter)
	for _, p := range of.Parts[:len(of.Parts)-1] {
		settled := func(ctx context.Context, tx pgx.Tx) (settled bool, err error) {
			err = tx.QueryRow(ctx, `SELECT `+settledSQL(t), t.String(), p.From, p.To, before).Scan(&settled)
			return settled, err
		}
		var dropped bool
		err := r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
			dropped, err = settled(ctx, tx)
			return err
		})
		if err == nil && dropped { // asked again behind the lock: a row may have been made pending again
			dropped, err = of.Drop(ctx, r.noting(t), p, true, settled)
		}
		if err != nil {
			return r.settle(err)
		}
		if !dropped {
			break
		}
		r.report.Dropped = append(r.report.Dropped, p.Name)
		if err := r.forgetDropped(ctx, t, p); err != nil {
			return err
		}
	}
	return nil
}

// forgetDropped takes the ids of a partition that was dropped out of the entries. Those of one that somebody
// has detached stay: it may come back.
func (r *pass) forgetDropped(ctx context.Context, t *outbox.Table, p partition.Part) error {
	const within = `int8range($2::bigint, $3::bigint)`
	for n := int64(1); n > 0; {
		err := r.db.QueryRow(ctx, []any{&n}, fmt.Sprintf(`WITH found AS MATERIALIZED (
				SELECT j.ctid AS place, range_merge(j.ids) <@ `+within+` AS whole FROM %s j
				WHERE j.outbox = $1 AND range_merge(j.ids) && `+within+` AND j.ids && `+within+` LIMIT %d
			), gone AS (
				DELETE FROM %[1]s j WHERE j.ctid = ANY (ARRAY(SELECT f.place FROM found f WHERE f.whole))
				RETURNING 1
			), cut AS (
				UPDATE %[1]s j SET ids = j.ids - int8multirange(`+within+`)
				WHERE j.ctid = ANY (ARRAY(SELECT f.place FROM found f WHERE NOT f.whole)) RETURNING 1
			) SELECT (SELECT count(*) FROM gone) + (SELECT count(*) FROM cut)`,
			t.Journal.Entries, sweepRows), t.String(), p.From, p.To)
		if err != nil {
			return r.settle(err)
		}
	}
	return nil
}
