package retention

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// archiveRows moves the processed rows of each outbox that are old enough.
func (r *pass) archiveRows(ctx context.Context) error {
	work := false
	r.report.Tables = make([]TableReport, len(r.opts.Tables))
	for i, t := range r.opts.Tables {
		report := &r.report.Tables[i]
		report.Table, report.Skipped = t.String(), r.unarchived(t)
		work = work || report.Skipped == ""
	}
	all := []error{r.deleteRows(ctx)}
	if !work {
		return errors.Join(all...)
	}
	if err := r.createAhead(ctx, r.archive); err != nil {
		return errors.Join(append(all, err)...)
	}
	for i, t := range r.opts.Tables {
		if report := &r.report.Tables[i]; report.Skipped == "" && ctx.Err() == nil && r.db.Alive() {
			all = append(all, r.archiveTable(ctx, r.archive, t, report))
		}
	}
	return errors.Join(all...)
}

// unarchived says what becomes of the processed rows of an outbox that do not go to the archive, or why. The
// archive has the canonical columns.
func (r *pass) unarchived(t *outbox.Table) string {
	switch {
	case table.Journals(t): // such a table never has an archive
		return r.deletion()
	case !table.MarkOf(t).Stays():
		return fmt.Sprintf("mark %q leaves no processed rows", t.Mark)
	case r.opts.ArchiveAfter == 0:
		return "archiving is off"
	case !table.IsArchived(t):
		return fmt.Sprintf("only the canonical layout is archived, not %q: %s", t.Layout.Name, r.deletion())
	case r.archive == nil:
		return "not archived: there is no archive, which `walpost migrate up` creates"
	}
	return ""
}

// deletion says what becomes of the rows of an outbox that has no archive.
func (r *pass) deletion() string {
	if r.opts.DeleteAfter > 0 {
		return fmt.Sprintf("processed rows are deleted after %s", r.opts.DeleteAfter)
	}
	return "processed rows stay"
}

// archiveTable moves rows, each batch in one statement. It first checks that no column would be lost, and
// that an index leads to the rows.
func (r *pass) archiveTable(ctx context.Context, a *monthly, t *outbox.Table, report *TableReport) error {
	columns, skipped, err := r.checkArchivable(ctx, a, t)
	if err != nil || skipped != "" {
		report.Skipped, report.Obstacle = skipped, skipped != ""
		return err
	}
	if err := r.db.Complete(ctx, t); err != nil {
		return err
	}
	fits := t.WhereSQL("t")
	if fits != "" {
		fits = " AND " + fits
	}
	before := r.now.Add(-r.opts.ArchiveAfter)
	refused := &refusedRows{table: t}
	err = r.sweep(ctx, sweep{
		from: t.SQL(), column: t.Column(outbox.ProcessedAt), before: before, count: &report.Archived,
		into: keepSQL(a, t, columns),
		ahead: func(ctx context.Context, from pgtype.Timestamptz, rows int) (string, error) {
			return r.monthsAhead(ctx, a, nextRows{t, before, from, rows}, fits+refused.sql())
		},
		id: t.Column(outbox.ID), refused: refused.add,
	})
	if len(refused.ids) > 0 {
		report.Refused = int64(len(refused.ids))
		refusal := fmt.Errorf("archive rows of %s: %d stay, the first has id %s: %w",
			t, len(refused.ids), refused.ids[0], refused.first)
		err = errors.Join(hint.Wrap(refusal, r.adviseArchive(refused.first, t)), err)
	} else if err != nil {
		err = hint.Wrap(fmt.Errorf("archive rows of %s: %w", t, err), r.adviseArchive(err, t))
	}
	if err != nil {
		return r.settle(err)
	}
	return nil
}

// keepSQL stores the deleted rows in the archive, in the same statement.
func keepSQL(a *monthly, t *outbox.Table, columns []string) string {
	return fmt.Sprintf(`, kept AS (
	INSERT INTO %s (outbox, %s) SELECT %s, %[2]s FROM gone
)`, a.SQL, strings.Join(columns, ", "), pg.QuoteLiteral(t.String()))
}

// mostRefused bounds the rows of an outbox that a pass leaves behind.
const mostRefused = 100

// refusedRows are those that the archive does not take, or the outbox does not give.
type refusedRows struct {
	table *outbox.Table
	ids   []string
	first error
}

func (x *refusedRows) add(id string, err error) error {
	if x.first == nil {
		x.first = err
	}
	if x.ids = append(x.ids, id); len(x.ids) == mostRefused {
		return fmt.Errorf("the pass ends after so many rows that cannot be archived: %w", err)
	}
	return nil
}

// sql is a condition over t that leaves the refused rows out.
func (x *refusedRows) sql() string {
	if len(x.ids) == 0 {
		return ""
	}
	quoted := make([]string, len(x.ids))
	for i, id := range x.ids {
		quoted[i] = pg.QuoteLiteral(id)
	}
	return fmt.Sprintf(" AND concat(t.%s) <> ALL (ARRAY[%s])",
		x.table.Column(outbox.ID), strings.Join(quoted, ", "))
}

func (r *pass) adviseArchive(err error, t *outbox.Table) string {
	var refused *pgconn.PgError
	switch errors.As(err, &refused); pg.Code(err) {
	case pgerrcode.InsufficientPrivilege:
		return fmt.Sprintf("as the tables' owner: GRANT SELECT, UPDATE (%s), DELETE ON %s TO %s; "+
			"GRANT SELECT, INSERT ON %s TO %[3]s",
			t.Column(outbox.ProcessedAt), t.SQL(), r.role, table.Archive)
	case pgerrcode.CheckViolation:
		if refused.ConstraintName == "" { // no partition for the row
			return fmt.Sprintf("CREATE TABLE %s_default PARTITION OF %[1]s DEFAULT", table.Archive)
		}
		return fmt.Sprintf("constraint %s of %s refuses the row: drop it, or correct the row",
			refused.ConstraintName, refused.TableName)
	case pgerrcode.ForeignKeyViolation:
		return fmt.Sprintf("constraint %s refers to the row: drop it, or turn archiving off "+
			"(retention.archive_after: 0s)", refused.ConstraintName)
	case pgerrcode.DatatypeMismatch:
		return fmt.Sprintf("give the columns of %s the types that they have in %s, or turn archiving off "+
			"(retention.archive_after: 0s)", table.Archive, t)
	}
	return ""
}

// indexedSQL reports whether a valid index of table $1 begins with column $2.
const indexedSQL = `SELECT EXISTS (
	SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
	WHERE i.indrelid = to_regclass($1) AND i.indisvalid AND a.attname = $2
)`

// checkArchivable returns the outbox's columns, quoted, or why its rows have to
// stay. A column that the archive lacks would be lost with the row.
func (r *pass) checkArchivable(
	ctx context.Context, a *monthly, t *outbox.Table,
) (columns []string, skipped string, err error) {
	var own, kept map[string]string
	err = r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		if own, err = columnTypes(ctx, conn, t); err != nil {
			return err
		}
		kept, err = columnTypes(ctx, conn, &outbox.Table{Schema: a.Schema, Name: a.Name})
		return err
	})
	if err != nil {
		return nil, "", fmt.Errorf("read columns of %s: %w", t, err)
	}
	if len(own) == 0 {
		return nil, "the table does not exist: run `walpost migrate up`", nil
	}
	if indexed, err := r.isIndexed(ctx, t); err != nil {
		return nil, "", err
	} else if !indexed {
		return nil, missingIndex(t), nil
	}
	for _, c := range slices.Sorted(maps.Keys(own)) {
		if kept[c] == "" {
			return nil, fmt.Sprintf("the archive has no column for %s: ALTER TABLE %s ADD COLUMN %[1]s %[3]s",
				outbox.QuoteIdent(c), table.Archive, own[c]), nil
		}
		columns = append(columns, outbox.QuoteIdent(c))
	}
	return columns, "", nil
}

// columnTypes are the types of a table's columns, by their names.
func columnTypes(ctx context.Context, conn *pgx.Conn, t *outbox.Table) (map[string]string, error) {
	columns, err := pg.ReadColumns(ctx, conn, t)
	types := map[string]string{}
	for _, c := range columns {
		types[c.Name] = c.Type
	}
	return types, err
}

// nextRows are the rows that a batch of the sweep will take.
type nextRows struct {
	table  *outbox.Table
	before time.Time
	from   pgtype.Timestamptz
	most   int
}

// monthsAhead creates the months of the next rows. It returns the condition but, extended to leave out the
// rows of months that cannot be created now.
func (r *pass) monthsAhead(
	ctx context.Context, a *monthly, next nextRows, but string,
) (only string, err error) {
	only = but
	for a.Owned {
		only = a.readyMonths(next.table) + but
		months, err := r.monthsOf(ctx, next, only)
		if err != nil {
			return "", err
		}
		waits := false
		for _, m := range months {
			ready, err := r.ensureMonth(ctx, a, m.UTC())
			if err != nil {
				return "", err
			}
			waits = waits || !ready
		}
		if !waits {
			break
		}
	}
	return only, nil
}

// readyMonths is a condition that leaves out the months that this pass failed to create.
func (a *monthly) readyMonths(t *outbox.Table) (only string) {
	for _, m := range slices.SortedFunc(maps.Keys(a.months), time.Time.Compare) {
		if !a.months[m] {
			from, to := partition.MonthBound(m), partition.MonthBound(m.AddDate(0, 1, 0))
			only += fmt.Sprintf(" AND (t.%s < %s OR t.%[1]s >= %[3]s)", t.Column(outbox.OccurredAt), from, to)
		}
	}
	return only
}

// monthsOf lists the months of the next rows.
func (r *pass) monthsOf(ctx context.Context, next nextRows, only string) (months []time.Time, err error) {
	t := next.table
	oldest, end := r.horizon()
	sql := strings.NewReplacer("{table}", t.SQL(), "{processed}", t.Column(outbox.ProcessedAt),
		"{occurred}", t.Column(outbox.OccurredAt), "{only}", only).Replace(`
SELECT DISTINCT date_trunc('month', o.at, 'UTC') FROM (
	SELECT t.{occurred} AS at FROM {table} t
	WHERE t.{processed} < $1::timestamptz AND t.{processed} >= $2::timestamptz{only}
	ORDER BY t.{processed} LIMIT $3
) o
WHERE o.at >= $4::timestamptz AND o.at < $5::timestamptz`)
	err = r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		result, _ := conn.Query(ctx, sql, next.before, next.from, next.most, oldest, end)
		months, err = pgx.CollectRows(result, pgx.RowTo[time.Time])
		return err
	})
	return months, err
}
