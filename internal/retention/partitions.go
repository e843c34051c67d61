package retention

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	// oldestMonth bounds the months that get a partition where nothing is dropped.
	oldestMonth = 10 * 365 * 24 * time.Hour
	// defaultRows bounds the rows that are moved from the default partition into a new month.
	defaultRows = 10_000
	// partitionStatement bounds the statements that create a month: while it is
	// attached, its readers wait.
	partitionStatement = 5 * time.Second
)

// monthly is a table that is partitioned by the month of occurred_at, as it was found.
type monthly struct {
	outbox.Table
	unsorted string             // the default partition, quoted, or ""
	storage  string             // parameters of that, for the months
	owned    bool               // by the role of this pass: months can be created and dropped
	months   map[time.Time]bool // the months looked for: whether rows can go there
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
	r.archive, r.report.Purges = a, r.opts.DropAfter > 0 && a.unsorted != ""
	return nil
}

// readMonthly reads a table, which is quoted. It returns nil where that is not partitioned by ranges of the
// column.
func (r *pass) readMonthly(ctx context.Context, name, column string) (*monthly, error) {
	m := &monthly{months: map[time.Time]bool{}}
	var has bool
	into := []any{&m.Schema, &m.Name, &has, &m.owned, &m.unsorted, &m.storage}
	err := r.db.QueryRow(ctx, into, monthlySQL, name, column)
	if err != nil || !has {
		return nil, err
	}
	return m, nil
}

// monthlySQL reads table $1: its name, whether it is partitioned by ranges of column $2, whether this role
// owns it, its default partition.
var monthlySQL = `
	SELECT n.nspname::text, c.relname::text,
		coalesce(pg_get_partkeydef(c.oid) = format('RANGE (%I)', $2::text), false),
		pg_has_role(c.relowner, 'USAGE'),
		coalesce(quote_ident(dn.nspname) || '.' || quote_ident(d.relname), ''),
		` + pg.StorageSQL("d.oid") + `
	FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		LEFT JOIN pg_partitioned_table pt ON pt.partrelid = c.oid
		LEFT JOIN pg_class d ON d.oid = pt.partdefid LEFT JOIN pg_namespace dn ON dn.oid = d.relnamespace
	WHERE c.oid = to_regclass($1)`

// mayAlter reports whether this role owns the archive, and notes where it does not.
func (r *pass) mayAlter(a *monthly) bool {
	if !a.owned {
		r.note("role %s does not own %s, so no month is created or dropped: "+
			"let the owner run `walpost retention`, or make it the owner", r.role, a.Name)
	}
	return a.owned
}

// partitionsSQL lists the partitions of $1 with their bounds.
const partitionsSQL = `SELECT format('%I.%I', n.nspname, c.relname) AS name, c.relname::text AS relname,
		coalesce((regexp_match(bound, 'FROM \(''(.*?)''\)'))[1]::timestamptz, '-infinity') AS lower,
		coalesce((regexp_match(bound, 'TO \(''(.*?)''\)'))[1]::timestamptz, 'infinity') AS upper
	FROM pg_inherits i
		JOIN pg_class c ON c.oid = i.inhrelid JOIN pg_namespace n ON n.oid = c.relnamespace,
		LATERAL pg_get_expr(c.relpartbound, c.oid) AS bound
	WHERE i.inhparent = to_regclass($1) AND bound <> 'DEFAULT'`

// horizon bounds the times for which months are created: from the oldest month that is kept to the end of the
// newest that is created ahead. Rows of other times go to the default partition.
func (r *pass) horizon() (from, to time.Time) {
	age := oldestMonth
	if r.opts.DropAfter > 0 {
		age = r.opts.DropAfter
	}
	return pg.MonthOf(r.now.Add(-age)), pg.MonthOf(r.now).AddDate(0, pg.MonthsAhead+1, 0)
}

// createAhead creates the present month and the next ones before they have rows: then no row has to leave the
// default partition, and no reader waits.
func (r *pass) createAhead(ctx context.Context, a *monthly) error {
	for i := 0; r.mayAlter(a) && i <= pg.MonthsAhead; i++ {
		if _, err := r.ensureMonth(ctx, a, pg.MonthOf(r.now).AddDate(0, i, 0)); err != nil {
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
	name := pg.MonthName(a.Name, month)
	var there bool
	err = r.db.QueryRow(ctx, []any{&there},
		`SELECT EXISTS (SELECT FROM (`+partitionsSQL+`) m WHERE m.lower < $3 AND m.upper > $2)`,
		a.SQL(), month, month.AddDate(0, 1, 0))
	if err != nil {
		return false, fmt.Errorf("look for %s: %w", name, err)
	}
	if there {
		return true, nil
	}
	err = r.createMonth(ctx, a, outbox.QuoteIdent(a.Schema)+"."+outbox.QuoteIdent(name), month)
	switch code := pg.Code(err); {
	case err == nil:
		r.report.Created = append(r.report.Created, name)
		return true, nil
	case blocked(err):
		r.note("%s is left to the next pass, with the rows that belong there: "+
			"somebody reads or alters %s (%v)", name, a.Name, err)
		return false, nil
	case errors.Is(err, errCrowded),
		code == pgerrcode.DuplicateTable, code == pgerrcode.InsufficientPrivilege,
		code == pgerrcode.QueryCanceled: // the default partition is too large to be searched
		r.note("%s cannot be created, so its rows go to the default partition: %v", name, err)
		return true, nil
	}
	return false, fmt.Errorf("create %s: %w", name, err)
}

var errCrowded = fmt.Errorf("the default partition holds more than %d rows of that month", defaultRows)

// createMonth creates a table, moves the month's rows into it from the default partition, and attaches it, in
// one transaction. ATTACH PARTITION, unlike CREATE TABLE ... PARTITION OF, waits only for transactions that
// use the default partition.
func (r *pass) createMonth(ctx context.Context, a *monthly, name string, month time.Time) error {
	from, to := pg.MonthBound(month), pg.MonthBound(month.AddDate(0, 1, 0))
	return r.inTx(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf(`
			SET LOCAL statement_timeout = %d;
			CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING IDENTITY)%s`,
			partitionStatement.Milliseconds(), name, a.SQL(), a.storage))
		if err != nil {
			return err
		}
		if a.unsorted != "" {
			span := fmt.Sprintf(`occurred_at >= %s AND occurred_at < %s`, from, to)
			if err := moveRows(ctx, tx, a.unsorted, name, span); err != nil {
				return err
			}
		}
		_, err = tx.Exec(ctx, fmt.Sprintf(`ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)`,
			a.SQL(), name, from, to))
		if err == nil {
			_, err = tx.Exec(ctx, pg.ShowPath)
		}
		return err
	})
}

// moveRows moves the rows of a span. It fails with [errCrowded] where they are too many for one statement.
func moveRows(ctx context.Context, tx pgx.Tx, from, to, span string) error {
	var n int
	err := tx.QueryRow(ctx, fmt.Sprintf(`SELECT count(*)::int FROM (SELECT FROM %s WHERE %s LIMIT %d) x`,
		from, span, defaultRows+1)).Scan(&n)
	if err != nil || n == 0 {
		return err
	}
	if n > defaultRows {
		return errCrowded
	}
	var columns string // by name: a table that was attached may have them in another order
	err = tx.QueryRow(ctx, `SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute
		WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''`,
		to).Scan(&columns)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, fmt.Sprintf(`
		WITH moved AS (
			DELETE FROM %s WHERE %s RETURNING *
		), here AS (
			INSERT INTO %s (%[4]s) SELECT %[4]s FROM moved RETURNING 1
		)
		SELECT count(*) FROM here WHERE %[5]s`, from, span, to, columns, pg.OwnPath))
	if err == nil {
		_, err = tx.Exec(ctx, pg.HidePath)
	}
	return err
}

func (r *pass) inTx(ctx context.Context, f func(context.Context, pgx.Tx) error) error {
	return r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return f(ctx, tx) })
	})
}
