package migrations

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// PartitionByMonth makes partitioned tables of the outboxes, by months of occurred_at: the rows that there
// are become one partition, with the months up to the next one. An empty table is replaced. Beside the months
// there is a default partition, so that no INSERT fails where a month is missing. It returns what it did.
//
// Producers and relays go on. They wait for half a second at a time while it tries to get the table's lock,
// and then for the time that some changes of the catalog take: no row is read or written behind the lock.
// The primary key becomes one of id and occurred_at, so that ids are not proven to be unique any more. It
// refuses tables that other objects depend on, or whose unique indexes lack occurred_at, and changes nothing.
func (r *Runner) PartitionByMonth(ctx context.Context) (done []string, err error) {
	for _, t := range r.outboxes {
		if t.Mark == outbox.MarkJournal || !t.Layout.Has(outbox.OccurredAt) {
			const want = "name an outbox with the mark update or delete, and a layout with occurred_at"
			return nil, hint.Errorf(want, "partition %s by month: its layout is %q and its mark %q",
				t, t.Layout.Name, t.Mark)
		}
	}
	err = r.withLock(ctx, notifyLock, func(conn *pgx.Conn, _ string) error {
		for _, t := range r.outboxes {
			c := &conversion{cfg: r.cfg, conn: conn, table: t, at: t.Column(outbox.OccurredAt)}
			did, err := c.run(ctx)
			if err != nil {
				return fmt.Errorf("partition %s by month: %w", t, err)
			}
			if did != "" {
				done = append(done, did)
			}
		}
		return nil
	})
	return done, explainNotify(err)
}

// conversion makes a partitioned table of one.
type conversion struct {
	cfg   *pgx.ConnConfig
	conn  *pgx.Conn
	table *outbox.Table
	at    string    // occurred_at, quoted
	now   time.Time // by the server's clock
	end   time.Time // of the months that the rows may have
	// checked: the table has the constraint.
	checked bool
	key     string // the primary key's name, quoted; "" where it has none
	index   string // that is to become the primary key; "" where it need not change
}

func (c *conversion) run(ctx context.Context) (did string, err error) {
	partitioned, err := c.check(ctx)
	if err != nil || partitioned {
		return "", err
	}
	c.end = pg.MonthOf(c.now).AddDate(0, 2, 0)
	var empty bool
	if err = c.proveMonths(ctx); err == nil {
		err = c.prepareKey(ctx)
	}
	if err == nil {
		empty, err = c.swap(ctx)
	}
	if err != nil {
		return "", errors.Join(err, c.giveUp())
	}
	if empty {
		return fmt.Sprintf("partitioned %s by month: it was empty", c.table), nil
	}
	return fmt.Sprintf("partitioned %s by month: its rows are in %s, which takes those up to %s",
		c.table, c.table.Schema+"."+oldName(c.table), c.end.Format(time.DateOnly)), nil
}

// oldName is the partition with the rows that there were.
func oldName(t *outbox.Table) string { return t.Name + "_old" }

// name is another table of its schema, quoted.
func (c *conversion) name(table string) string {
	return outbox.QuoteIdent(c.table.Schema) + "." + outbox.QuoteIdent(table)
}

// check reports whether the table is partitioned by months already, and why it cannot be.
func (c *conversion) check(ctx context.Context) (partitioned bool, err error) {
	var kind, key, typ string
	var byTime, child, rowSecurity bool
	t := c.table
	err = c.conn.QueryRow(ctx, `SELECT c.relkind::text, coalesce(pg_get_partkeydef(c.oid), ''),
			coalesce(pg_get_partkeydef(c.oid) = format('RANGE (%I)', $2::text), false),
			coalesce((SELECT format_type(a.atttypid, NULL) FROM pg_attribute a
				WHERE a.attrelid = c.oid AND a.attname = $2 AND NOT a.attisdropped), 'no type'),
			EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhrelid, i.inhparent)),
			c.relrowsecurity, now()
		FROM pg_class c WHERE c.oid = to_regclass($1)`, t.SQL(), t.Layout.Columns[outbox.OccurredAt]).
		Scan(&kind, &key, &byTime, &typ, &child, &rowSecurity, &c.now)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, hint.Errorf("check outboxes[].table", "the table does not exist")
	case err != nil:
		return false, err
	case byTime:
		return true, nil
	case kind == "p":
		return false, hint.Errorf("see `\\d+ "+t.String()+"`", "it is partitioned by %s", key)
	case kind != "r":
		return false, hint.Errorf("name an ordinary table in outboxes[].table", "it is not a table")
	case typ != "timestamp with time zone":
		return false, hint.Errorf("the column has to be a timestamptz",
			"%s has %s", t.Layout.Columns[outbox.OccurredAt], typ)
	case child:
		return false, hint.Errorf("see `\\d+ "+t.String()+"`", "it inherits, or is inherited from")
	case rowSecurity:
		return false, hint.Errorf("turn it off, and create the policies again afterwards",
			"it has row level security")
	}
	return false, c.checkDependents(ctx)
}

// checkDependents refuses what would stay with the rows that there are, and know nothing of later ones.
func (c *conversion) checkDependents(ctx context.Context) error {
	var dependent string
	err := c.conn.QueryRow(ctx, `SELECT coalesce((
		SELECT concat('constraint ', conname, ' of ', conrelid::regclass) FROM pg_constraint
		WHERE contype = 'f' AND (confrelid = to_regclass($1) OR conrelid = to_regclass($1)) LIMIT 1), (
		SELECT concat('view ', w.ev_class::regclass) FROM pg_depend d JOIN pg_rewrite w ON w.oid = d.objid
		WHERE d.classid = 'pg_rewrite'::regclass AND d.refclassid = 'pg_class'::regclass
			AND d.refobjid = to_regclass($1) LIMIT 1), (
		SELECT concat('unique index ', i.indexrelid::regclass, ', which lacks ', $2::text) FROM pg_index i
		WHERE i.indrelid = to_regclass($1) AND i.indisunique AND NOT i.indisprimary AND NOT EXISTS (
			SELECT FROM pg_attribute a WHERE a.attrelid = i.indrelid AND a.attname = $2
			AND a.attnum = ANY (i.indkey)) LIMIT 1), '')`,
		c.table.SQL(), c.table.Layout.Columns[outbox.OccurredAt]).Scan(&dependent)
	if err == nil && dependent != "" {
		err = hint.Errorf("drop it, and create it again afterwards if a partitioned table can have it",
			"it has %s", dependent)
	}
	return err
}

// prepareKey indexes the primary key's columns together with occurred_at.
func (c *conversion) prepareKey(ctx context.Context) error {
	var columns string
	var complete bool
	err := c.conn.QueryRow(ctx, `SELECT quote_ident(k.conname), string_agg(quote_ident(a.attname), ', '
			ORDER BY array_position(k.conkey, a.attnum)), bool_or(a.attname = $2)
		FROM pg_constraint k JOIN pg_attribute a ON a.attrelid = k.conrelid AND a.attnum = ANY (k.conkey)
		WHERE k.conrelid = to_regclass($1) AND k.contype = 'p' GROUP BY k.conname`,
		c.table.SQL(), c.table.Layout.Columns[outbox.OccurredAt]).Scan(&c.key, &columns, &complete)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && complete {
		return nil
	}
	if err != nil {
		return err
	}
	c.index = c.table.Name + "_by_month_pkey"
	var broken bool // by another run
	err = c.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_index
		WHERE indexrelid = to_regclass($1) AND NOT indisvalid)`, c.name(c.index)).Scan(&broken)
	if err == nil && broken {
		err = patiently(ctx, c.conn, `DROP INDEX `+c.name(c.index))
	}
	if err != nil {
		return err
	}
	return c.exec(ctx, `SET lock_timeout = 0; SET statement_timeout = 0`,
		fmt.Sprintf(`CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS %s ON %s (%s, %s)`,
			outbox.QuoteIdent(c.index), c.table.SQL(), columns, c.at),
		fmt.Sprintf(`SET lock_timeout = %d`, notifyLock.Milliseconds()))
}

// proveMonths proves that no row is of a month at or after c.end.
func (c *conversion) proveMonths(ctx context.Context) error {
	err := patiently(ctx, c.conn, fmt.Sprintf(`ALTER TABLE %s ADD CONSTRAINT %s
		CHECK (%s IS NOT NULL AND %[3]s < %[4]s) NOT VALID`,
		c.table.SQL(), pg.MonthCheck, c.at, pg.MonthBound(c.end)))
	if err != nil && pg.Code(err) != pgerrcode.DuplicateObject {
		return err
	}
	c.checked = true
	err = c.exec(ctx, fmt.Sprintf(`ALTER TABLE %s VALIDATE CONSTRAINT %s`, c.table.SQL(), pg.MonthCheck))
	if pg.Code(err) == pgerrcode.CheckViolation {
		return hint.Wrap(err, fmt.Sprintf("a row has no %s, or one at or after %s: see "+
			"SELECT * FROM %s WHERE (%s < %s) IS NOT TRUE", c.table.Layout.Columns[outbox.OccurredAt],
			c.end.Format(time.DateOnly), c.table.SQL(), c.at, pg.MonthBound(c.end)))
	}
	return err
}

// giveUp takes back what was prepared, on another connection: where a statement was cancelled, its own is
// closed. An index that it cannot drop is used by the next run.
func (c *conversion) giveUp() (err error) {
	if !c.checked {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pg.ConnectConfig(ctx, c.cfg)
	drop := fmt.Sprintf(`ALTER TABLE %s DROP CONSTRAINT %s`, c.table.SQL(), pg.MonthCheck)
	if err == nil {
		defer conn.Close(ctx) //nolint:errcheck // its statements have ended
		_, err = conn.Exec(ctx, fmt.Sprintf(`SET lock_timeout = %d`, notifyLock.Milliseconds()))
		if err == nil && c.index != "" {
			_, _ = conn.Exec(ctx, `DROP INDEX IF EXISTS `+c.name(c.index))
		}
		if err == nil {
			err = patiently(ctx, conn, drop)
		}
	}
	if err != nil {
		err = hint.Wrap(fmt.Errorf("rows from %s on are refused: %w", c.end.Format(time.DateOnly), err),
			"before that time, run this again, or: "+drop)
	}
	return err
}

// swap puts the partitioned table in the place of the old one, as one of its partitions, or, where that is
// empty, without it.
func (c *conversion) swap(ctx context.Context) (empty bool, err error) {
	for i := 1; ; i++ {
		empty, err = c.trySwap(ctx)
		if i == notifyAttempts || pg.Code(err) != pgerrcode.LockNotAvailable || !sleep.For(ctx, notifyLock) {
			return empty, err
		}
	}
}

func (c *conversion) trySwap(ctx context.Context) (empty bool, err error) {
	tx, err := c.conn.Begin(ctx)
	if err != nil {
		return false, err
	}
	defer tx.Rollback(ctx) //nolint:errcheck // there is nothing to roll back after the commit
	this := c.table.SQL()
	if _, err = tx.Exec(ctx, `LOCK TABLE `+this+` IN ACCESS EXCLUSIVE MODE`); err != nil {
		return false, err
	}
	var version int
	var storage string
	err = tx.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM `+this+`),
		current_setting('server_version_num')::int, `+pg.StorageSQL("to_regclass($1)"), this).
		Scan(&empty, &version, &storage)
	if err != nil {
		return false, err
	}
	leave, err := c.list(ctx, tx, leaveSQL)
	if err != nil {
		return false, err
	}
	takeOver, err := c.list(ctx, tx, takeOverSQL, publishedSQL(version))
	if err != nil {
		return false, err
	}
	for _, statement := range slices.Concat(leave, c.replaceSQL(empty, storage), takeOver, c.dropSQL(empty)) {
		if _, err := tx.Exec(ctx, statement); err != nil {
			err = fmt.Errorf("%s: %w", statement, err)
			if pg.Code(err) == pgerrcode.DuplicateTable {
				err = hint.Wrap(err, "rename that table: a partition is to have its name")
			}
			return false, err
		}
	}
	return empty, tx.Commit(ctx)
}

// replaceSQL puts the partitioned table in the place of the old one, with partitions for what is to come.
func (c *conversion) replaceSQL(empty bool, storage string) (all []string) {
	this, old := c.table.SQL(), c.name(oldName(c.table))
	if c.index != "" {
		all = append(all, fmt.Sprintf(`ALTER TABLE %s DROP CONSTRAINT %s,
			ADD CONSTRAINT %[2]s PRIMARY KEY USING INDEX %[3]s`, this, c.key, outbox.QuoteIdent(c.index)))
	}
	all = append(all, `ALTER TABLE `+this+` RENAME TO `+outbox.QuoteIdent(oldName(c.table)),
		fmt.Sprintf(`CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING IDENTITY) PARTITION BY RANGE (%s)`,
			this, old, c.at),
		fmt.Sprintf(`ALTER TABLE %s DROP CONSTRAINT %s`, this, pg.MonthCheck),
		fmt.Sprintf(`CREATE TABLE %s PARTITION OF %s DEFAULT%s`,
			c.name(c.table.Name+"_default"), this, storage))
	from := pg.MonthOf(c.now)
	if !empty {
		from = c.end
		all = append(all,
			fmt.Sprintf(`ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (MINVALUE) TO (%s)`,
				this, old, pg.MonthBound(c.end)),
			fmt.Sprintf(`ALTER TABLE %s DROP CONSTRAINT %s`, old, pg.MonthCheck))
	}
	for ; !from.After(pg.MonthOf(c.now).AddDate(0, pg.MonthsAhead, 0)); from = from.AddDate(0, 1, 0) {
		all = append(all, fmt.Sprintf(`CREATE TABLE %s PARTITION OF %s FOR VALUES FROM (%s) TO (%s)%s`,
			c.name(pg.MonthName(c.table.Name, from)), this,
			pg.MonthBound(from), pg.MonthBound(from.AddDate(0, 1, 0)), storage))
	}
	return all
}

// dropSQL drops the old table where it is no partition.
func (c *conversion) dropSQL(empty bool) []string {
	if !empty {
		return nil
	}
	return []string{`DROP TABLE ` + c.name(oldName(c.table))}
}

// list runs queries for statements about table $1.
func (c *conversion) list(
	ctx context.Context, tx pgx.Tx, queries ...string,
) (statements []string, err error) {
	for _, query := range queries {
		rows, _ := tx.Query(ctx, query, c.table.SQL())
		some, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, err
		}
		statements = append(statements, some...)
	}
	return statements, nil
}

func (c *conversion) exec(ctx context.Context, statements ...string) error {
	for _, sql := range statements {
		if _, err := c.conn.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}
