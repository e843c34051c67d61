package retention

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/pg"
)

// purgeArchive drops the months whose rows were all processed longer than DropAfter ago, and deletes such
// rows from the default partition. The archive's processed_at is NOT NULL: a row that is not processed cannot
// be lost here.
func (r *pass) purgeArchive(ctx context.Context) error {
	a := r.archive
	if r.opts.DropAfter == 0 || a == nil {
		return nil
	}
	before := r.now.Add(-r.opts.DropAfter)
	err := r.dropMonths(ctx, a, oldMonths{before: before, keeps: "processed_at >= $1"})
	if a.Default == "" || ctx.Err() != nil || !r.db.Alive() {
		return err
	}
	return errors.Join(err, r.purgeDefault(ctx, a, before))
}

func (r *pass) purgeDefault(ctx context.Context, a *monthly, before time.Time) error {
	old := sweep{from: a.Default, column: "processed_at", before: before, count: &r.report.Purged}
	err := r.sweep(ctx, old)
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		err = hint.Wrap(err, fmt.Sprintf("as the owner: GRANT SELECT, UPDATE, DELETE ON %s TO %s",
			a.Default, r.role))
	}
	if err != nil {
		return r.settle(fmt.Errorf("delete old rows of %s: %w", a.Default, err))
	}
	return nil
}

// oldMonths are those that ended before a time and have no row that keeps them.
type oldMonths struct {
	before time.Time
	keeps  string // a condition over a row t, with before as $1
}

func (r *pass) dropMonths(ctx context.Context, a *monthly, old oldMonths) error {
	t, err := r.readParts(ctx, a.SQL, a.Column, a.By)
	if err != nil || t == nil {
		return err
	}
	months := slices.DeleteFunc(t.Parts, func(p partition.Part) bool { return p.To > old.before.Unix() })
	if len(months) == 0 || !r.mayAlter(t) {
		return nil
	}
	var all []error
	for _, m := range months {
		may := func(ctx context.Context, tx pgx.Tx) (may bool, err error) {
			err = tx.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM `+m.SQL+` t WHERE `+old.keeps+
				` AND $1::timestamptz IS NOT NULL)`, old.before).Scan(&may)
			return may, err
		}
		dropped, err := t.Drop(ctx, r.politely(), m, false, may)
		if dropped {
			r.report.Dropped = append(r.report.Dropped, m.Name)
		}
		switch pg.Code(err) {
		case pgerrcode.InsufficientPrivilege:
			err = hint.Wrap(err, fmt.Sprintf("ALTER TABLE %s OWNER TO %s", m.SQL, r.role))
		case pgerrcode.DependentObjectsStillExist:
			err = hint.Wrap(err,
				"DROP TABLE "+m.SQL+" says what depends on it: drop that, or detach the month")
		}
		if err != nil {
			all = append(all, r.settle(fmt.Errorf("drop %s: %w", m.Name, err)))
		}
	}
	return errors.Join(all...)
}
