package retention

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/sleep"
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
	// Producers wait for as long as a statement waits for its lock. It tries so often.
	rangeLock  = 50 * time.Millisecond
	rangeTries = 20
	// validateRange bounds the search of the last partition for ids, where it has rows. Producers go on.
	validateRange = 10 * time.Minute
	// rangeCheck is the constraint that spares ATTACH PARTITION that search. It refuses ids that are
	// refusedAfter partitions ahead, until the cut is made or given up.
	rangeCheck   = "walpost_range"
	refusedAfter = 10
)

// leastRange is how many ids a partition has at least.
var leastRange int64 = 1_000_000

// idRange is a partition, with ids from one up to, and without, another.
type idRange struct {
	Name     string // without its schema
	SQL      string
	From, To int64
	Checked  bool // rangeCheck was left there
}

// bounds are as ALTER TABLE takes them.
func bounds(from, to int64) string {
	low, high := fmt.Sprint(from), fmt.Sprint(to)
	if from == math.MinInt64 {
		low = "MINVALUE"
	}
	if to == math.MaxInt64 {
		high = "MAXVALUE"
	}
	return fmt.Sprintf("FOR VALUES FROM (%s) TO (%s)", low, high)
}

// keepRanges cuts and drops partitions of an outbox. It reports false where the outbox has none by ids: its
// old rows are deleted one by one.
func (r *pass) keepRanges(ctx context.Context, t *outbox.Table) (has bool, err error) {
	all, owned, err := r.readRanges(ctx, t)
	if err != nil || len(all) == 0 {
		return false, err
	}
	if !owned {
		r.note("role %s does not own %s, so no partition of it is cut or dropped: "+
			"let the owner run `walpost retention`, or make it the owner", r.role, t)
		return true, nil
	}
	if all[len(all)-1].To != math.MaxInt64 {
		r.note("%s has no partition to MAXVALUE, so no partition is cut: "+
			"rows are refused behind the last one", t)
	} else if err := r.cutRanges(ctx, t, all[len(all)-1]); err != nil {
		return true, fmt.Errorf("cut partitions of %s: %w", t, err)
	}
	if r.opts.DeleteAfter > 0 {
		if err := r.dropRanges(ctx, t, all[:len(all)-1]); err != nil {
			return true, fmt.Errorf("drop partitions of %s: %w", t, err)
		}
	}
	return true, nil
}

// readRanges lists the partitions in the order of their ids.
func (r *pass) readRanges(ctx context.Context, t *outbox.Table) (all []idRange, owned bool, err error) {
	err = r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var byID bool
		err := conn.QueryRow(ctx, `SELECT
				coalesce(pg_get_partkeydef(oid) = format('RANGE (%I)', $2::text), false),
				pg_has_role(relowner, 'USAGE') FROM pg_class WHERE oid = to_regclass($1)`,
			t.SQL(), t.Layout.Columns[outbox.ID]).Scan(&byID, &owned)
		if errors.Is(err, pgx.ErrNoRows) || err == nil && !byID {
			return nil
		}
		if err != nil {
			return err
		}
		rows, _ := conn.Query(ctx, `SELECT c.relname::text, format('%I.%I', n.nspname, c.relname),
				coalesce((regexp_match(bound, 'FROM \(''(-?\d+)''\)'))[1]::bigint, $2),
				coalesce((regexp_match(bound, 'TO \(''(-?\d+)''\)'))[1]::bigint, $3),
				EXISTS (SELECT FROM pg_constraint k WHERE k.conrelid = c.oid AND k.conname = $4)
			FROM pg_inherits i
				JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace,
				LATERAL pg_get_expr(c.relpartbound, c.oid) AS bound
			WHERE i.inhparent = to_regclass($1) AND bound <> 'DEFAULT' ORDER BY 3`,
			t.SQL(), int64(math.MinInt64), int64(math.MaxInt64), rangeCheck)
		all, err = pgx.CollectRows(rows, pgx.RowToStructByPos[idRange])
		return err
	})
	if err != nil {
		err = fmt.Errorf("read partitions of %s: %w", t, err)
	}
	return all, owned, err
}

// cutRanges makes partitions until enough of them lie between the newest id and the last one.
func (r *pass) cutRanges(ctx context.Context, t *outbox.Table, last idRange) error {
	if last.Checked { // a pass was broken off
		if err := r.uncheck(ctx, last); err != nil {
			return r.settle(err)
		}
	}
	for range mostCuts {
		newest, size, err := r.nextRange(ctx, t)
		if err != nil {
			return err
		}
		if last.From > newest && last.From-newest > rangesAhead*size {
			return nil
		}
		next, err := r.cut(ctx, t, last, newest, size)
		if errors.Is(err, errFilled) {
			continue
		}
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
func (r *pass) cut(ctx context.Context, t *outbox.Table, last idRange, newest, size int64) (idRange, error) {
	filled, err := r.filled(ctx, last)
	if err != nil {
		return idRange{}, err
	}
	next := idRange{From: last.From, To: max(last.From, 1) + size}
	if filled {
		next.To = newest + refusedAfter*size + 1
	}
	next.Name = fmt.Sprintf("%s_%d", t.Name, next.To-1)
	next.SQL = outbox.QuoteIdent(t.Schema) + "." + outbox.QuoteIdent(next.Name)
	if !filled {
		return next, r.patiently(ctx, func() error { return r.cutEmpty(ctx, t, last, next) })
	}
	if err = r.check(ctx, t, last, next); err == nil {
		err = r.patiently(ctx, func() error { return r.cutFilled(ctx, t, last, next) })
	}
	if err != nil {
		err = errors.Join(err, r.uncheck(context.WithoutCancel(ctx), last))
	}
	return next, err
}

func (r *pass) filled(ctx context.Context, p idRange) (has bool, err error) {
	err = r.db.QueryRow(ctx, []any{&has}, `SELECT EXISTS (SELECT FROM `+p.SQL+`)`)
	return has, err
}

var errFilled = errors.New("rows came into the last partition")

// cutEmpty puts an empty partition before the empty last one.
func (r *pass) cutEmpty(ctx context.Context, t *outbox.Table, last, next idRange) error {
	return r.alone(ctx, t, createSQL(t, next.SQL), func(ctx context.Context, tx pgx.Tx) error {
		var filled bool
		err := tx.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+last.SQL+`)`).Scan(&filled)
		if err == nil && filled {
			err = errFilled
		}
		if err == nil {
			_, err = tx.Exec(ctx, fmt.Sprintf(`ALTER TABLE %[1]s DETACH PARTITION %[2]s;
				ALTER TABLE %[1]s ATTACH PARTITION %[3]s %[4]s;
				ALTER TABLE %[1]s ATTACH PARTITION %[2]s %[5]s`,
				t.SQL(), last.SQL, next.SQL, bounds(next.From, next.To), bounds(next.To, math.MaxInt64)))
		}
		return err
	})
}

// cutFilled ends the last partition where its constraint does, and puts an empty one behind it.
func (r *pass) cutFilled(ctx context.Context, t *outbox.Table, last, next idRange) error {
	fresh := outbox.QuoteIdent(t.Schema) + "." + outbox.QuoteIdent(last.Name)
	return r.alone(ctx, t, "", func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf(`ALTER TABLE %[1]s DETACH PARTITION %[2]s;
			ALTER TABLE %[2]s RENAME TO %[3]s;
			%[4]s;
			ALTER TABLE %[1]s ATTACH PARTITION %[5]s %[6]s;
			ALTER TABLE %[5]s DROP CONSTRAINT %[7]s;
			ALTER TABLE %[1]s ATTACH PARTITION %[8]s %[9]s`,
			t.SQL(), last.SQL, outbox.QuoteIdent(next.Name), createSQL(t, fresh), next.SQL,
			bounds(next.From, next.To), rangeCheck, fresh, bounds(next.To, math.MaxInt64)))
		return err
	})
}

// createSQL makes a table that can become a partition. Vacuum has nothing to do there but to freeze.
func createSQL(t *outbox.Table, name string) string {
	return fmt.Sprintf(`CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING IDENTITY) WITH (
		autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_insert_threshold = -1)`,
		name, t.SQL())
}

// check proves that every id in the last partition belongs into the one that it is to become.
func (r *pass) check(ctx context.Context, t *outbox.Table, last, next idRange) error {
	id := t.Column(outbox.ID)
	within := fmt.Sprintf("%[1]s IS NOT NULL AND %[1]s >= %[2]d AND %[1]s < %[3]d", id, next.From, next.To)
	err := r.patiently(ctx, func() error {
		return r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = %d;
				ALTER TABLE %s ADD CONSTRAINT %s CHECK (%s) NOT VALID`,
				rangeLock.Milliseconds(), last.SQL, rangeCheck, within))
			return err
		})
	})
	if err != nil {
		return err
	}
	return r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL statement_timeout = %d;
			ALTER TABLE %s VALIDATE CONSTRAINT %s`, validateRange.Milliseconds(), last.SQL, rangeCheck))
		return err
	})
}

func (r *pass) uncheck(ctx context.Context, last idRange) error {
	return r.patiently(ctx, func() error {
		return r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = %d;
				ALTER TABLE %s DROP CONSTRAINT IF EXISTS %s`,
				rangeLock.Milliseconds(), last.SQL, rangeCheck))
			return err
		})
	})
}

// alone runs do in a transaction that nobody else uses the outbox beside. first runs before producers wait.
func (r *pass) alone(
	ctx context.Context, t *outbox.Table, first string, do func(context.Context, pgx.Tx) error,
) error {
	return r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = %d; %s`,
			rangeLock.Milliseconds(), first))
		if err == nil {
			_, err = tx.Exec(ctx, `LOCK TABLE `+t.SQL()+` IN ACCESS EXCLUSIVE MODE`)
		}
		if err == nil {
			err = do(ctx, tx)
		}
		return err
	})
}

// patiently tries again where a lock was not to be had.
func (r *pass) patiently(ctx context.Context, do func() error) (err error) {
	for range rangeTries {
		if err = do(); err == nil || !blocked(err) || !sleep.For(ctx, 2*rangeLock) {
			return err
		}
	}
	return err
}

// settledSQL is the condition that nothing of a partition is needed: every id in $2 to $3 of outbox $1 is
// done with, and was before $4.
func settledSQL(t *outbox.Table) string {
	return fmt.Sprintf(`EXISTS (SELECT FROM %s p WHERE p.outbox = $1 AND p.settled_to >= $3::bigint - 1
			AND NOT p.holes && int8range($2::bigint, $3::bigint))
		AND NOT EXISTS (SELECT FROM %s d WHERE d.outbox = $1 AND d.id >= $2::bigint AND d.id < $3::bigint)
		AND NOT EXISTS (SELECT FROM %s j WHERE j.outbox = $1 AND j.processed_at >= $4::timestamptz
			AND range_merge(j.ids) && int8range($2::bigint, $3::bigint)
			AND j.ids && int8range($2::bigint, $3::bigint))`,
		t.Journal.Progress, t.Journal.Deferred, t.Journal.Entries)
}

// dropRanges drops partitions whose rows are delivered and old, the first ones, and then the entries of their
// ids.
func (r *pass) dropRanges(ctx context.Context, t *outbox.Table, all []idRange) error {
	before := r.now.Add(-r.opts.DeleteAfter)
	for _, p := range all {
		settled := false
		look := func(ctx context.Context, tx pgx.Tx) error {
			return tx.QueryRow(ctx, `SELECT `+settledSQL(t), t.String(), p.From, p.To, before).Scan(&settled)
		}
		if err := r.inTx(ctx, look); err != nil {
			return r.settle(err)
		}
		if !settled {
			break
		}
		err := r.patiently(ctx, func() error {
			return r.alone(ctx, t, "", func(ctx context.Context, tx pgx.Tx) error {
				err := look(ctx, tx) // a row may have been made pending again
				if err == nil && settled {
					_, err = tx.Exec(ctx, `DROP TABLE `+p.SQL)
				}
				return err
			})
		})
		if err != nil {
			return r.settle(err)
		}
		if !settled {
			break
		}
		r.report.Dropped = append(r.report.Dropped, p.Name)
	}
	return r.forgetDropped(ctx, t)
}

// forgetDropped deletes the entries of ids before the first partition.
func (r *pass) forgetDropped(ctx context.Context, t *outbox.Table) error {
	all, _, err := r.readRanges(ctx, t)
	if err != nil || len(all) == 0 || all[0].From == math.MinInt64 {
		return err
	}
	for n := int64(1); n > 0; {
		err := r.db.QueryRow(ctx, []any{&n}, fmt.Sprintf(`WITH gone AS (
				DELETE FROM %s j WHERE j.ctid = ANY (ARRAY(
					SELECT o.ctid FROM %[1]s o
					WHERE o.outbox = $1 AND range_merge(o.ids) << int8range($2, NULL) LIMIT %d))
				RETURNING 1
			) SELECT count(*) FROM gone`, t.Journal.Entries, sweepRows), t.String(), all[0].From)
		if err != nil {
			return r.settle(err)
		}
	}
	return nil
}
