package retention

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
)

// oldestMonth bounds the months that get a partition where nothing is dropped.
const oldestMonth = 10 * 365 * 24 * time.Hour

// monthly is a table that is partitioned by the month of occurred_at.
type monthly struct {
	*partition.Table
	months map[time.Time]bool // the months looked for: whether rows can go there
}

// findArchive sets r.archive. It leaves nil, with a note, where no archive can be used.
func (r *pass) findArchive(ctx context.Context) error {
	if r.opts.ArchiveAfter == 0 && r.opts.DropAfter == 0 {
		return nil
	}
	has, err := r.exists(ctx, table.Archive, r.tables.archive)
	if err == nil && has && !slices.ContainsFunc(r.opts.Tables, table.IsArchived) {
		err = r.db.QueryRow(ctx, []any{&has}, `SELECT EXISTS (SELECT FROM `+r.tables.archive+`)`)
	}
	if err != nil || !has { // an archive that nothing comes to needs no privileges once it is empty
		return err
	}
	a, err := r.readMonthly(ctx, r.tables.archive, "occurred_at")
	if err != nil {
		return fmt.Errorf("read %s: %w", table.Archive, err)
	}
	if a == nil {
		r.note("table %s is not partitioned by occurred_at, as `walpost migrate up` makes it, "+
			"so nothing is archived or dropped", table.Archive)
		return nil
	}
	r.archive, r.report.Purges = a, r.opts.DropAfter > 0 && a.Default != ""
	return nil
}

// readMonthly reads a table, which is quoted. It returns nil where that is not partitioned by ranges of the
// column.
func (r *pass) readMonthly(ctx context.Context, name, column string) (*monthly, error) {
	t, err := r.readParts(ctx, name, column, partition.Months)
	if err != nil || t == nil {
		return nil, err
	}
	return &monthly{Table: t, months: map[time.Time]bool{}}, nil
}

func (r *pass) readParts(
	ctx context.Context, name, column string, by partition.By,
) (t *partition.Table, err error) {
	err = r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		t, err = partition.Read(ctx, conn, name, column, by)
		return err
	})
	if err != nil {
		err = fmt.Errorf("read partitions of %s: %w", name, err)
	}
	return t, err
}

// mayAlter reports whether this role owns the table, and notes where it does not.
func (r *pass) mayAlter(t *partition.Table) bool {
	if !t.Owned {
		r.note("role %s does not own %s, so no partition of it is created or dropped: "+
			"let the owner run `walpost retention`, or make it the owner", r.role, t)
	}
	return t.Owned
}

// horizon bounds the times for which months are created: from the oldest month that is kept to the end of the
// newest that is created ahead. Rows of other times go to the default partition.
func (r *pass) horizon() (from, to time.Time) {
	age := oldestMonth
	if r.opts.DropAfter > 0 {
		age = r.opts.DropAfter
	}
	return partition.MonthOf(r.now.Add(-age)), partition.MonthOf(r.now).AddDate(0, partition.MonthsAhead+1, 0)
}

// createAhead creates the present month and the next ones before they have rows: then no row has to leave the
// default partition, and no reader waits.
func (r *pass) createAhead(ctx context.Context, a *monthly) error {
	for i := 0; r.mayAlter(a.Table) && i <= partition.MonthsAhead; i++ {
		if _, err := r.ensureMonth(ctx, a, partition.MonthOf(r.now).AddDate(0, i, 0)); err != nil {
			return err
		}
	}
	return nil
}

// ensureMonth creates the partition of a month unless it exists. It returns false where it got no lock: the
// month's rows then wait for the next pass. Where the month cannot be created at all, it notes that and
// returns true: the default partition takes the rows.
func (r *pass) ensureMonth(ctx context.Context, a *monthly, month time.Time) (ready bool, err error) {
	if ready, known := a.months[month]; known {
		return ready, nil
	}
	defer func() { a.months[month] = ready }()
	p := a.Month(month)
	if a.Overlaps(p) {
		return true, nil
	}
	err = a.Add(ctx, r.inTx, p)
	switch code := pg.Code(err); {
	case err == nil:
		r.report.Created = append(r.report.Created, p.Name)
		return true, nil
	case pg.IsBlocked(err):
		r.note("%s is left to the next pass, with the rows that belong there: "+
			"somebody reads or alters %s (%v)", p.Name, a.Name, err)
		return false, nil
	case errors.Is(err, partition.ErrCrowded),
		code == pgerrcode.DuplicateTable, code == pgerrcode.InsufficientPrivilege,
		code == pgerrcode.QueryCanceled: // the default partition is too large to be searched
		r.note("%s cannot be created, so its rows go to the default partition: %v", p.Name, err)
		return true, nil
	}
	return false, fmt.Errorf("create %s: %w", p.Name, err)
}

func (r *pass) inTx(ctx context.Context, f func(context.Context, pgx.Tx) error) error {
	return r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error { return pg.BeginOn(conn)(ctx, f) })
}

// politely is how this pass changes partitions. Users of their table wait for rangeLock at a time.
func (r *pass) politely() pg.Polite {
	return pg.Polite{Begin: r.inTx, Lock: rangeLock, Tries: rangeTries}
}
