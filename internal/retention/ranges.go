package retention

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
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
	// mostCurrent is how long a partition takes ids at most, or rangeShare of the time after which rows go.
	mostCurrent = 24 * time.Hour
	// mostCuts bounds the partitions that one pass cuts.
	mostCuts = 16
	// Producers wait for as long as a statement waits for its lock, which it does rangeTries times.
	rangeLock = 50 * time.Millisecond
	// Ids that are leastRange so often ahead, or a partition, are refused while a filled one is cut.
	refusedAfter = 10
	// mostCut is an id behind which sizes cannot be added any more.
	mostCut = math.MaxInt64 / 2
	// mostKept bounds how far the rows are counted that keep a partition.
	mostKept = 1000
)

// leastRange is how many ids a partition has at least.
var leastRange int64 = 1_000_000

// rangeTries is a variable for tests.
var rangeTries = 20

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
	} else if err = r.cutRanges(ctx, t, p); err != nil {
		err = fmt.Errorf("cut partitions of %s: %w", t, err)
	}
	if r.opts.DeleteAfter > 0 {
		if failed := r.dropRanges(ctx, t, p); failed != nil {
			err = errors.Join(err, fmt.Errorf("drop partitions of %s: %w", t, failed))
		}
	}
	return true, err
}

func (r *pass) readRanges(ctx context.Context, t *outbox.Table) (*partition.Table, error) {
	return r.readParts(ctx, t.SQL(), t.Layout.Columns[outbox.ID], partition.IDs)
}

// cutRanges makes partitions until enough of them lie between the newest id and the last one, and ends one
// that has taken ids for too long.
func (r *pass) cutRanges(ctx context.Context, t *outbox.Table, p *partition.Table) error {
	last := p.Parts[len(p.Parts)-1]
	if err := p.Uncheck(ctx, r.noting(t)); err != nil {
		return r.settle(err)
	}
	taken, err := r.taken(ctx, t, p)
	if err != nil {
		return err
	}
	size := r.nextSize(taken)
	for range mostCuts {
		newest, err := r.newestID(ctx, t)
		if err != nil {
			return err
		}
		if newest > mostCut {
			r.note("%s has no partition behind id %d cut: its ids come to their end", t, newest)
			return nil
		}
		if last.From > newest && last.From-newest > rangesAhead*size {
			return r.settle(r.cutEarly(ctx, t, newest))
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

// newestID is the newest id that was drawn.
func (r *pass) newestID(ctx context.Context, t *outbox.Table) (newest int64, err error) {
	err = r.db.QueryRow(ctx, []any{&newest}, `
		SELECT coalesce(pg_sequence_last_value(pg_get_serial_sequence($1, $2)::regclass), 0)`,
		t.SQL(), t.Layout.Columns[outbox.ID])
	return newest, err
}

// taken is what the journal has of a partition. Its times are the database's: those in the rows are whatever
// their producer wants.
type taken struct {
	part  partition.Part
	rows  int64
	began time.Time // the first mark
}

// taken are the partitions that have taken the newest ids, two at most, the newest first.
func (r *pass) taken(ctx context.Context, t *outbox.Table, p *partition.Table) (all []taken, err error) {
	for i := len(p.Parts) - 1; i >= 0 && len(all) < 2; i-- {
		of := taken{part: p.Parts[i]}
		var began *time.Time
		err := r.db.QueryRow(ctx, []any{&began, &of.rows}, `
			SELECT min(j.processed_at), coalesce(sum(upper(e) - lower(e)), 0)::bigint
			FROM `+t.Journal.Entries+` j, unnest(j.ids * int8multirange(int8range($2::bigint, $3::bigint))) e
			WHERE j.outbox = $1 AND range_merge(j.ids) && int8range($2::bigint, $3::bigint)`,
			t.String(), of.part.From, of.part.To)
		if err != nil {
			return nil, err
		}
		if began != nil {
			of.began = *began
			all = append(all, of)
		}
	}
	return all, nil
}

// nextSize is how many ids a partition is to have: those of rangeTime, at the rate at which the last one took
// its own before the present one began. It is at most twice as many as that had, and half at least.
func (r *pass) nextSize(of []taken) int64 {
	if len(of) < 2 {
		return leastRange
	}
	span := rangeTime
	if r.opts.DeleteAfter > 0 {
		span = min(span, r.opts.DeleteAfter/rangeShare)
	}
	last := of[1]
	took := max(of[0].began.Sub(last.began), time.Second)
	ids := float64(last.rows) * span.Seconds() / took.Seconds()
	ids = min(max(ids, float64(last.rows)/2), 2*float64(max(last.rows, leastRange)))
	return max(leastRange, int64(ids)/leastRange*leastRange)
}

// cutEarly ends the partition that takes the newest ids where it has done so for too long: it would be kept
// as long again.
func (r *pass) cutEarly(ctx context.Context, t *outbox.Table, newest int64) error {
	p, err := r.readRanges(ctx, t) // again: this pass may have cut it
	if err != nil || p == nil {
		return err
	}
	of, err := r.taken(ctx, t, p)
	if err != nil || len(of) == 0 || newest < of[0].part.From || newest >= of[0].part.To {
		return err
	}
	now := of[0]
	took := r.now.Sub(now.began)
	if took < max(mostCurrent, r.opts.DeleteAfter/rangeShare) {
		return nil
	}
	// Ids from there on are refused for a moment: as many as come in a minute are left free, and leastRange.
	free := leastRange + int64(float64(now.rows)*time.Minute.Seconds()/took.Seconds())
	next := p.Part(now.part.From, newest+free+1)
	if next.To >= now.part.To {
		return nil
	}
	if err := r.cutFilled(ctx, t, p, now.part, next); err != nil {
		return err
	}
	r.report.Created = append(r.report.Created, next.Name)
	return nil
}

// cut makes the partition before the last one: from its part where it is empty, else of all that it has.
func (r *pass) cut(
	ctx context.Context, t *outbox.Table, p *partition.Table, last partition.Part, newest, size int64,
) (partition.Part, error) {
	next := p.Part(last.From, max(last.From, newest, 1)+size)
	err := p.CutEmpty(ctx, r.noting(t), last, next)
	if errors.Is(err, partition.ErrFilled) {
		next = p.Part(last.From, newest+max(size, refusedAfter*leastRange)+1)
		err = r.cutFilled(ctx, t, p, last, next)
	}
	return next, err
}

func (r *pass) cutFilled(
	ctx context.Context, t *outbox.Table, p *partition.Table, part, next partition.Part,
) error {
	err := p.CutFilled(ctx, r.noting(t), part, next)
	if pg.Code(err) == pgerrcode.CheckViolation {
		return hint.Errorf(fmt.Sprintf("when they are delivered: DELETE FROM %s WHERE %s >= %d",
			part.SQL, t.Column(outbox.ID), next.To),
			"rows of %s have ids far ahead of the sequence, which somebody has given them: %w",
			part.Name, err)
	}
	return err
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

// settledSQL is the condition that no relay needs a partition: every id in $2 to $3 of outbox $1 is done
// with, under each condition, and was before $4. A progress of other partitions says nothing.
func settledSQL(t *outbox.Table) string {
	return fmt.Sprintf(`(SELECT bool_and(%s) FROM %s k WHERE k.outbox = $1) IS TRUE AND %s`,
		passedSQL(t), t.Journal.Known, oldSQL(t))
}

// passedSQL is the condition that the progress in a row k of outbox_known is behind these ids.
func passedSQL(t *outbox.Table) string {
	return fmt.Sprintf(`NOT k.unsettled && int8range($2::bigint, $3::bigint)
		AND k.table_oid = to_regclass(%s) AND k.partitions = %s`,
		pg.QuoteLiteral(t.SQL()), table.PartitionsSQL(t))
}

// oldSQL is the condition that none of these ids is deferred, and none has an entry since $4.
func oldSQL(t *outbox.Table) string {
	return fmt.Sprintf(`%s
		AND NOT EXISTS (SELECT FROM %s d WHERE d.outbox = $1 AND d.id >= $2::bigint AND d.id < $3::bigint)
		AND NOT EXISTS (SELECT FROM %s j WHERE j.outbox = $1 AND j.processed_at >= $4::timestamptz
			AND range_merge(j.ids) && int8range($2::bigint, $3::bigint)
			AND j.ids && int8range($2::bigint, $3::bigint))`,
		table.BoundSQL(t), t.Journal.Deferred, t.Journal.Entries)
}

// behindSQL is another condition of the outbox whose progress has not come to the end of these ids, where
// that of $5 has. NULL: there is none.
func behindSQL(t *outbox.Table) string {
	return fmt.Sprintf(`(SELECT min(k.condition) FROM %s k WHERE k.outbox = $1 AND (%s) IS NOT TRUE
		AND EXISTS (SELECT FROM %[1]s k WHERE k.outbox = $1 AND k.condition = $5 AND %[2]s) AND %[3]s)`,
		t.Journal.Known, passedSQL(t), oldSQL(t))
}

// openIDsSQL are the ids in $2 to $3 of outbox $1 that no entry has.
func openIDsSQL(t *outbox.Table) string {
	return fmt.Sprintf(`int8multirange(int8range($2::bigint, $3::bigint)) - coalesce((
		SELECT range_agg(e) FROM %s j, unnest(j.ids) e
		WHERE j.outbox = $1 AND range_merge(j.ids) && int8range($2::bigint, $3::bigint)), '{}')`,
		t.Journal.Entries)
}

// keptSQL are the rows of a partition with some ids that no entry has: at most mostKept. No relay has
// delivered them, and they are not to go yet.
func (r *pass) keptSQL(t *outbox.Table, p partition.Part, ids string) string {
	return fmt.Sprintf(`SELECT t.id FROM unnest(%s) r, LATERAL (SELECT t.%s AS id FROM %s t
			WHERE %s AND NOT %s ORDER BY t.%[2]s LIMIT %[6]d) t LIMIT %[6]d`,
		ids, t.Column(outbox.ID), p.SQL, table.WithinSQL("t."+t.Column(outbox.ID)),
		r.excludedSQL(t, "t"), mostKept)
}

// excludedSQL is the condition under which a row is no event of this outbox, and so old that it may go.
func (r *pass) excludedSQL(t *outbox.Table, alias string) string {
	fits := t.WhereSQL(alias)
	if r.opts.ExcludedAfter == 0 || fits == "" || !t.Layout.Has(outbox.OccurredAt) {
		return "false"
	}
	return fmt.Sprintf("(%s IS NOT TRUE AND %s.%s < %s)", fits, alias, t.Column(outbox.OccurredAt),
		pg.QuoteLiteral(r.now.Add(-r.opts.ExcludedAfter).Format(time.RFC3339Nano)))
}

// FindKept finds the partitions of an append-only outbox that passes do not drop because of rows that no
// relay has delivered.
func FindKept(ctx context.Context, db *table.DB, t *outbox.Table, opts Options) (all []Kept, err error) {
	r := &pass{db: db, opts: opts}
	if !table.Journals(t) || opts.DeleteAfter == 0 {
		return nil, nil
	}
	if err := db.QueryRow(ctx, []any{&r.now}, `SELECT now()`); err != nil {
		return nil, err
	}
	of, err := r.readRanges(ctx, t)
	if err != nil || of == nil {
		return nil, err
	}
	for _, p := range of.Parts[:max(len(of.Parts)-1, 0)] {
		settled, _, kept, err := r.rowsOf(ctx, t, p)
		if err != nil {
			return nil, fmt.Errorf("look for rows that keep partitions of %s: %w", t, err)
		}
		if kept.known() {
			all = append(all, kept)
		}
		if !settled {
			break // the later ones are younger
		}
	}
	return all, nil
}

// rowsOf says whether a partition is settled, which of its ids no entry has, and which rows keep it.
func (r *pass) rowsOf(
	ctx context.Context, t *outbox.Table, p partition.Part,
) (settled bool, open string, kept Kept, err error) {
	kept.Partition = p.Name
	err = r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		args := []any{t.String(), p.From, p.To}
		before := r.now.Add(-r.opts.DeleteAfter)
		err := tx.QueryRow(ctx, `SELECT `+settledSQL(t), append(args, before)...).Scan(&settled)
		if err == nil && !settled {
			return tx.QueryRow(ctx, `SELECT `+behindSQL(t), append(args, before, t.Where)...).
				Scan(&kept.Behind)
		}
		if err != nil {
			return err
		}
		return tx.QueryRow(ctx, `WITH open AS MATERIALIZED (SELECT `+openIDsSQL(t)+` AS ids)
			SELECT o.ids::text, k.rows, k.first FROM open o, LATERAL (
				SELECT count(*) AS rows, coalesce(min(k.id), 0) AS first
				FROM (`+r.keptSQL(t, p, "o.ids")+`) k) k`, args...).
			Scan(&open, &kept.Rows, &kept.First)
	})
	return settled, open, kept, err
}

// dropRanges drops partitions that no relay needs and whose rows all have an entry, and then the entries of
// their ids.
func (r *pass) dropRanges(ctx context.Context, t *outbox.Table, of *partition.Table) error {
	if err := r.forgetDropped(ctx, t); err != nil {
		return r.settle(err)
	}
	for _, p := range of.Parts[:len(of.Parts)-1] {
		settled, open, kept, err := r.rowsOf(ctx, t, p)
		if err != nil {
			return r.settle(err)
		}
		if kept.known() {
			r.report.Kept = append(r.report.Kept, kept)
		}
		switch {
		case !settled:
			return nil // the later ones are younger
		case kept.known():
			continue
		}
		// Asked again behind the lock: rows may have been inserted, or made pending again.
		may := func(ctx context.Context, tx pgx.Tx) (may bool, err error) {
			err = tx.QueryRow(ctx, `SELECT `+settledSQL(t)+` AND NOT EXISTS (
				`+r.keptSQL(t, p, "$5::int8multirange")+`)`,
				t.String(), p.From, p.To, r.now.Add(-r.opts.DeleteAfter), open).Scan(&may)
			if err == nil && may {
				_, err = tx.Exec(ctx, `UPDATE `+t.Journal.Known+` SET dropped = dropped
					+ int8multirange(int8range($2::bigint, $3::bigint)) WHERE outbox = $1`,
					t.String(), p.From, p.To)
			}
			return may, err
		}
		dropped, err := of.Drop(ctx, r.noting(t), p, true, may)
		var refused *pgconn.PgError
		if errors.As(err, &refused) && refused.Code == pgerrcode.DependentObjectsStillExist {
			r.note("partition %s of %s stays until what needs it is dropped: %s", p.Name, t, refused.Detail)
			continue
		}
		if pg.Code(err) == pgerrcode.InsufficientPrivilege { // it is another role's than the table
			r.note("partition %s of %s stays: %v", p.Name, t, err)
			continue
		}
		if err != nil {
			return r.settle(err)
		}
		if !dropped {
			r.note("partition %s of %s stays, and later ones: it is being detached, or has pending rows",
				p.Name, t)
			return nil
		}
		r.report.Dropped = append(r.report.Dropped, p.Name)
		if err := r.forgetDropped(ctx, t); err != nil {
			return r.settle(err)
		}
	}
	return nil
}

// forgetDropped takes the ids of partitions that were dropped out of the entries, those that an earlier pass
// has left, too. The ids of rows in a partition that somebody has detached stay: it may come back.
func (r *pass) forgetDropped(ctx context.Context, t *outbox.Table) error {
	detached, err := r.db.Detached(ctx, t) // if one is attached meanwhile, it is present
	if err != nil {
		return err
	}
	of, err := r.readRanges(ctx, t)
	if err != nil || of == nil {
		return err
	}
	var present []string // a partition that was made since may have the ids
	for _, p := range of.Parts {
		present = append(present, fmt.Sprintf("[%d,%d)", p.From, p.To))
	}
	again, err := r.db.Detached(ctx, t) // if one is detached meanwhile, it was present or is among these
	if err != nil {
		return err
	}
	kept := "'{}'::int8multirange"
	detached = slices.Compact(slices.Sorted(slices.Values(append(detached, again...))))
	for _, name := range detached {
		kept += fmt.Sprintf(` + coalesce((SELECT range_agg(int8range(t.%s, t.%[1]s, '[]'))
			FROM left_over, unnest(dropped) r, %s t WHERE %s), '{}')`,
			t.Column(outbox.ID), name, table.WithinSQL("t."+t.Column(outbox.ID)))
	}
	var ids *string
	err = r.db.QueryRow(ctx, []any{&ids}, fmt.Sprintf(`WITH left_over AS (
			UPDATE %s SET dropped = dropped - $2::int8multirange WHERE outbox = $1 AND NOT isempty(dropped)
			RETURNING dropped
		) SELECT nullif(range_agg(d) - (%s), '{}')::text FROM left_over, unnest(dropped) d`,
		t.Journal.Known, kept), t.String(), "{"+strings.Join(present, ",")+"}")
	if pg.Code(err) == pgerrcode.InsufficientPrivilege && len(detached) > 0 {
		r.note("entries of dropped partitions of %s stay: %s may be detached ones, and one cannot be read: "+
			"%v", t, strings.Join(detached, ", "), err)
		return nil
	}
	if err != nil || ids == nil {
		return err
	}
	for n := 1; n > 0; {
		err := r.db.QueryRow(ctx, []any{&n}, fmt.Sprintf(`WITH found AS MATERIALIZED (
				SELECT j.ctid AS place, j.ids <@ $2::int8multirange AS whole FROM %s j
				WHERE j.outbox = $1 AND range_merge(j.ids) && range_merge($2::int8multirange)
					AND j.ids && $2::int8multirange LIMIT %d FOR UPDATE
			), gone AS (
				DELETE FROM %[1]s j WHERE j.ctid = ANY (ARRAY(SELECT f.place FROM found f WHERE f.whole))
			), cut AS (
				UPDATE %[1]s j SET ids = j.ids - $2::int8multirange
				WHERE j.ctid = ANY (ARRAY(SELECT f.place FROM found f WHERE NOT f.whole))
			) SELECT count(*) FROM found`, t.Journal.Entries, sweepRows), t.String(), *ids)
		if err != nil {
			return err
		}
	}
	return r.db.QueryRow(ctx, []any{new(int)}, fmt.Sprintf(`WITH done AS (
			UPDATE %s SET dropped = dropped - $2::int8multirange WHERE outbox = $1 RETURNING 1
		) SELECT count(*) FROM done`, t.Journal.Known), t.String(), *ids)
}
