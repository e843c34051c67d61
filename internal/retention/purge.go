package retention

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
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
	if a.unsorted == "" || ctx.Err() != nil || !r.db.Alive() {
		return err
	}
	return errors.Join(err, r.purgeDefault(ctx, a, before))
}

func (r *pass) purgeDefault(ctx context.Context, a *monthly, before time.Time) error {
	old := sweep{from: a.unsorted, column: "processed_at", before: before, count: &r.report.Purged}
	err := r.sweep(ctx, old)
	if pg.Code(err) == pgerrcode.InsufficientPrivilege {
		err = hint.Wrap(err, fmt.Sprintf("as the owner: GRANT SELECT, UPDATE, DELETE ON %s TO %s",
			a.unsorted, r.role))
	}
	if err != nil {
		return r.settle(fmt.Errorf("delete old rows of %s: %w", a.unsorted, err))
	}
	return nil
}

// oldMonths are those that ended before a time and have no row that keeps them.
type oldMonths struct {
	before time.Time
	keeps  string // a condition over a row t, with before as $1
}

func (r *pass) dropMonths(ctx context.Context, a *monthly, old oldMonths) error {
	type month struct{ SQL, Name string }
	var months []month
	err := r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		result, _ := conn.Query(ctx,
			`SELECT m.name, m.relname FROM (`+partitionsSQL+`) m WHERE m.upper <= $2 ORDER BY m.upper`,
			a.SQL(), old.before)
		months, err = pgx.CollectRows(result, pgx.RowToStructByPos[month])
		return err
	})
	if err != nil {
		return fmt.Errorf("read partitions of %s: %w", a.Name, err)
	}
	if len(months) == 0 || !r.mayAlter(a) {
		return nil
	}
	var all []error
	for _, m := range months {
		var dropped bool
		err := r.patiently(ctx, func() (err error) {
			dropped, err = r.dropMonth(ctx, m.SQL, old)
			return err
		})
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

// dropMonth checks the rows under a lock that keeps others from adding one. The DROP comes last: all who use
// the table wait while it tries to get its lock.
func (r *pass) dropMonth(ctx context.Context, name string, old oldMonths) (dropped bool, err error) {
	err = r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf(`SET LOCAL lock_timeout = %d; LOCK TABLE %s IN SHARE MODE`,
			rangeLock.Milliseconds(), name))
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, `SELECT NOT EXISTS (
			SELECT FROM `+name+` t WHERE `+old.keeps+` AND $1::timestamptz IS NOT NULL)`, old.before).
			Scan(&dropped)
		if err != nil || !dropped {
			return err
		}
		_, err = tx.Exec(ctx, `DROP TABLE `+name)
		return err
	})
	return dropped && err == nil, err
}
