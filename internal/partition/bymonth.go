package partition

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// ByMonth makes partitioned tables of the outboxes, by months of occurred_at: the rows that there are become
// one partition, with the months up to the next one. An empty table is replaced. Beside the months there is a
// default partition, so that no INSERT fails where a month is missing. It returns what it did.
//
// Producers and relays go on. They wait for half a second at a time while it tries to get the table's lock,
// and then for the time that some changes of the catalog take: no row is read or written behind the lock.
// The primary key becomes one of id and occurred_at, so that ids are not proven to be unique any more. It
// refuses tables that other objects depend on, or whose unique indexes lack occurred_at, and changes nothing.
//
// A failed attempt is taken back on a connection of cfg: where a statement was cancelled, conn is closed.
func ByMonth(
	ctx context.Context, conn *pgx.Conn, cfg *pgx.ConnConfig, own pg.Own, outboxes []*outbox.Table,
) (done []string, err error) {
	for _, t := range outboxes {
		if t.Mark == outbox.MarkJournal || !t.Layout.Has(outbox.OccurredAt) {
			const want = "name an outbox with the mark update or delete, and a layout with occurred_at"
			return nil, hint.Errorf(want, "partition %s by month: its layout is %q and its mark %q",
				t, t.Layout.Name, t.Mark)
		}
	}
	for _, t := range outboxes {
		of := Table{Schema: t.Schema, Name: t.Name, SQL: t.SQL(), By: Months}
		of.Column = t.Layout.Columns[outbox.OccurredAt]
		c := &conversion{Table: of, cfg: cfg, conn: conn, tables: pg.PoliteOn(conn), own: own}
		did, err := c.run(ctx)
		if err != nil {
			return done, fmt.Errorf("partition %s by month: %w", t, err)
		}
		if did != "" {
			done = append(done, did)
		}
	}
	return done, nil
}

// conversion makes a partitioned table of one.
type conversion struct {
	Table   // as it will be
	cfg     *pgx.ConnConfig
	conn    *pgx.Conn
	tables  pg.Polite // on conn
	now     time.Time // by the server's clock
	end     time.Time // of the months that the rows may have
	old     Part      // with the rows that there are
	key     string    // the primary key's name, quoted; "" where it has none
	index   string    // that is to become the primary key; "" where it need not change
	checked bool      // the table has the constraint
	own     pg.Own
	known   string // outbox_known, quoted; "" where it does not exist
}

func (c *conversion) at() string { return outbox.QuoteIdent(c.Column) }

func (c *conversion) run(ctx context.Context) (did string, err error) {
	partitioned, err := c.check(ctx)
	if err != nil || partitioned {
		return "", err
	}
	if err := c.findKnown(ctx); err != nil {
		return "", err
	}
	c.end = MonthOf(c.now).AddDate(0, 2, 0)
	c.old = c.part(c.Name+"_old", math.MinInt64, c.end.Unix())
	var empty bool
	if err = c.proveMonths(ctx); err == nil {
		err = c.prepareKey(ctx)
	}
	if err == nil {
		err = c.tables.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			empty, err = c.swap(ctx, tx)
			return err
		})
		if pg.Code(err) == pgerrcode.DuplicateTable {
			err = hint.Wrap(err, "rename that table: a partition is to have its name")
		}
	}
	if err != nil {
		return "", errors.Join(err, c.giveUp())
	}
	if empty {
		return fmt.Sprintf("partitioned %s by month: it was empty", &c.Table), nil
	}
	return fmt.Sprintf("partitioned %s by month: its rows are in %s, which takes those up to %s",
		&c.Table, c.Schema+"."+c.old.Name, c.end.Format(time.DateOnly)), nil
}

// findKnown finds outbox_known, which says by the table's OID what outbox it is.
func (c *conversion) findKnown(ctx context.Context) error {
	found, err := c.own.Find(ctx, c.conn, "outbox_known")
	if err != nil {
		return err
	}
	var exists, writes bool
	err = c.conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL,
			coalesce(has_table_privilege(to_regclass($1), 'UPDATE'), false)`, found[0]).
		Scan(&exists, &writes)
	if err != nil || !exists {
		return err
	}
	if !writes {
		return hint.Errorf(fmt.Sprintf("GRANT UPDATE ON %s TO %s", found[0],
			outbox.QuoteIdent(c.conn.Config().User)),
			"the role lacks privilege UPDATE on table outbox_known, which has the OID of %s", c.String())
	}
	c.known = found[0]
	return nil
}

// check reports whether the table is partitioned by months already, and why it cannot be.
func (c *conversion) check(ctx context.Context) (partitioned bool, err error) {
	var kind, key, typ string
	var byTime, child, rowSecurity bool
	err = c.conn.QueryRow(ctx, `SELECT c.relkind::text, coalesce(pg_get_partkeydef(c.oid), ''),
			coalesce(pg_get_partkeydef(c.oid) = format('RANGE (%I)', $2::text), false),
			coalesce((SELECT format_type(a.atttypid, NULL) FROM pg_attribute a
				WHERE a.attrelid = c.oid AND a.attname = $2 AND NOT a.attisdropped), 'no type'),
			EXISTS (SELECT FROM pg_inherits i WHERE c.oid IN (i.inhrelid, i.inhparent)),
			c.relrowsecurity, now()
		FROM pg_class c WHERE c.oid = to_regclass($1)`, c.SQL, c.Column).
		Scan(&kind, &key, &byTime, &typ, &child, &rowSecurity, &c.now)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, hint.Errorf("check outboxes[].table", "the table does not exist")
	case err != nil:
		return false, err
	case byTime:
		return true, nil
	case kind == "p":
		return false, hint.Errorf("see `\\d+ "+c.String()+"`", "it is partitioned by %s", key)
	case kind != "r":
		return false, hint.Errorf("name an ordinary table in outboxes[].table", "it is not a table")
	case typ != "timestamp with time zone":
		return false, hint.Errorf("the column has to be a timestamptz", "%s has %s", c.Column, typ)
	case child:
		return false, hint.Errorf("see `\\d+ "+c.String()+"`", "it inherits, or is inherited from")
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
		c.SQL, c.Column).Scan(&dependent)
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
		c.SQL, c.Column).Scan(&c.key, &columns, &complete)
	if errors.Is(err, pgx.ErrNoRows) || err == nil && complete {
		return nil
	}
	if err != nil {
		return err
	}
	c.index = c.Name + "_by_month_pkey"
	var broken bool // by another run
	err = c.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_index
		WHERE indexrelid = to_regclass($1) AND NOT indisvalid)`, c.part(c.index, 0, 0).SQL).Scan(&broken)
	if err == nil && broken {
		err = c.tables.Exec(ctx, `DROP INDEX `+c.part(c.index, 0, 0).SQL)
	}
	if err != nil {
		return err
	}
	_, err = c.conn.Exec(ctx, `SET lock_timeout = 0; SET statement_timeout = 0`)
	if err == nil {
		_, err = c.conn.Exec(ctx, fmt.Sprintf(`CREATE UNIQUE INDEX CONCURRENTLY IF NOT EXISTS %s
			ON %s (%s, %s)`, outbox.QuoteIdent(c.index), c.SQL, columns, c.at()))
	}
	return err
}

// proveMonths proves that no row is of a month at or after c.end.
func (c *conversion) proveMonths(ctx context.Context) error {
	var err error
	c.checked, err = c.prove(ctx, c.tables, c.SQL, c.old, 0)
	if pg.Code(err) == pgerrcode.CheckViolation {
		return hint.Wrap(err, fmt.Sprintf("a row has no %s, or one at or after %s: see "+
			"SELECT * FROM %s WHERE (%s < %s) IS NOT TRUE", c.Column,
			c.end.Format(time.DateOnly), c.SQL, c.at(), MonthBound(c.end)))
	}
	return err
}

// giveUp takes back what was prepared. An index that it cannot drop is used by the next run.
func (c *conversion) giveUp() (err error) {
	if !c.checked {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pg.ConnectConfig(ctx, c.cfg)
	if err == nil {
		defer conn.Close(ctx) //nolint:errcheck // its statements have ended
		if c.index != "" {
			_ = pg.PoliteOn(conn).Exec(ctx, `DROP INDEX IF EXISTS `+c.part(c.index, 0, 0).SQL)
		}
		err = pg.PoliteOn(conn).Exec(ctx, uncheck(c.SQL))
	}
	if err != nil {
		err = hint.Wrap(fmt.Errorf("rows from %s on are refused: %w", c.end.Format(time.DateOnly), err),
			"before that time, run this again, or: "+uncheck(c.SQL))
	}
	return err
}

// swap puts the partitioned table in the place of the old one, as one of its partitions, or, where that is
// empty, without it.
func (c *conversion) swap(ctx context.Context, tx pgx.Tx) (empty bool, err error) {
	if err := execAll(ctx, tx, c.lock()); err != nil {
		return false, err
	}
	var version int
	err = tx.QueryRow(ctx, `SELECT NOT EXISTS (SELECT FROM `+c.SQL+`),
		current_setting('server_version_num')::int`).Scan(&empty, &version)
	if err != nil {
		return false, err
	}
	leave, err := c.list(ctx, tx, leaveSQL)
	if err != nil {
		return false, err
	}
	takeOver, err := c.list(ctx, tx, takeOverSQL+" UNION ALL "+publishedSQL(version))
	if err != nil {
		return false, err
	}
	var before uint32
	if err := tx.QueryRow(ctx, `SELECT to_regclass($1)::oid`, c.SQL).Scan(&before); err != nil {
		return false, err
	}
	for _, statement := range slices.Concat(leave, c.replaceSQL(), takeOver) {
		if _, err := tx.Exec(ctx, statement); err != nil {
			return false, fmt.Errorf("%s: %w", statement, err)
		}
	}
	if c.known != "" { // it is the same outbox
		_, err := tx.Exec(ctx, `UPDATE `+c.known+` SET table_oid = to_regclass($1) WHERE table_oid = $2`,
			c.SQL, before)
		if err != nil {
			return false, fmt.Errorf("write outbox_known: %w", err)
		}
	}
	return empty, c.addParts(ctx, tx, empty)
}

// replaceSQL puts a partitioned table without partitions in the place of the old one.
func (c *conversion) replaceSQL() (all []string) {
	if c.index != "" {
		all = append(all, fmt.Sprintf(`ALTER TABLE %s DROP CONSTRAINT %s,
			ADD CONSTRAINT %[2]s PRIMARY KEY USING INDEX %[3]s`, c.SQL, c.key, outbox.QuoteIdent(c.index)))
	}
	return append(all, `ALTER TABLE `+c.SQL+` RENAME TO `+outbox.QuoteIdent(c.old.Name),
		fmt.Sprintf(`CREATE TABLE %s (LIKE %s INCLUDING ALL EXCLUDING IDENTITY) PARTITION BY RANGE (%s)`,
			c.SQL, c.old.SQL, c.at()), uncheck(c.SQL))
}

// addParts gives the table its partitions: the default one, the old table unless that is empty, and the
// months to come.
func (c *conversion) addParts(ctx context.Context, tx pgx.Tx, empty bool) error {
	rest := c.part(c.Name+"_default", 0, 0)
	err := c.create(ctx, tx, rest.SQL, c.old.SQL)
	if err == nil {
		err = execAll(ctx, tx, `ALTER TABLE `+c.SQL+` ATTACH PARTITION `+rest.SQL+` DEFAULT`)
	}
	month, last := MonthOf(c.now), MonthOf(c.now).AddDate(0, MonthsAhead, 0)
	if err == nil && empty {
		err = execAll(ctx, tx, `DROP TABLE `+c.old.SQL)
	} else if err == nil {
		month = c.end
		err = execAll(ctx, tx, c.attach(c.old), uncheck(c.old.SQL))
	}
	for ; err == nil && !month.After(last); month = month.AddDate(0, 1, 0) {
		if err = c.create(ctx, tx, c.Month(month).SQL, rest.SQL); err == nil {
			err = execAll(ctx, tx, c.attach(c.Month(month)))
		}
	}
	return err
}

// list runs a query for statements about the table.
func (c *conversion) list(ctx context.Context, tx pgx.Tx, query string) ([]string, error) {
	rows, _ := tx.Query(ctx, query, c.SQL)
	return pgx.CollectRows(rows, pgx.RowTo[string])
}
