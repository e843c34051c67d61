package table

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// KnownTable says by what outboxes are known, and how far the journal's progress is. It has a row for each
// outbox and condition.
const KnownTable = "outbox_known"

// KnownPrivileges are what a relay needs on outbox_known.
const KnownPrivileges = "SELECT, INSERT, UPDATE"

// known is what a row of outbox_known says of an outbox.
type known struct {
	name     string
	relation uint32
	table    string // its name with its schema, when it was seen last
	source   string // the default one
	// here: the row was written into this table of this database. A dump, or a copy of the database, brings
	// rows whose OIDs say nothing.
	here bool
	// system: it was written on this server. In a copy of a database its tables have the same OIDs.
	system bool
	// gone: there is no such table here.
	gone bool
	// root is the partitioned table that it has become a partition of, or 0.
	root uint32
	// copied is the database that the row was copied from, if that still exists on this server.
	copied string
}

// nameOf finds the name of an outbox in the rows of outbox_known. The OID of its table tells it, whatever the
// table is called now. Rows that a dump has brought tell it by the table's name. Another table under the name
// of a known one is another outbox, unless that has become its partition.
func nameOf(t *outbox.Table, rows []known) (name, copied string) {
	first := t.FirstName()
	taken := map[string]bool{}
	for _, k := range rows {
		if k.here && k.relation == t.OID {
			return k.name, ""
		}
		taken[k.name] = taken[k.name] || k.here
	}
	parts := map[string]bool{} // the outboxes whose tables are its partitions now
	for _, k := range rows {
		if k.here && k.root != 0 && k.root == t.OID {
			parts[k.name] = true
		}
	}
	if parts[first] {
		return first, ""
	}
	if len(parts) == 1 {
		for name = range parts {
			return name, ""
		}
	}
	for _, byOID := range []bool{true, false} {
		for _, k := range rows {
			same := k.table == t.Relation() || k.name == t.Given
			if byOID {
				same = k.system && k.relation == t.OID
			}
			if same && !k.here && !taken[k.name] {
				return k.name, k.copied
			}
		}
	}
	name = first
	for n := 2; slices.ContainsFunc(rows, func(k known) bool { return k.name == name }); n++ {
		name = first + "/" + strconv.Itoa(n)
	}
	return name, ""
}

// Replaces reports whether another table had the outbox's name before. All its rows are delivered, whatever
// postgres.initial says.
func Replaces(t *outbox.Table) bool { return strings.HasPrefix(t.Known, t.FirstName()+"/") }

// bind finds by what a table's outbox is known.
func (own *ownTables) bind(
	ctx context.Context, conn *pgx.Conn, t outbox.Table, oid uint32,
) (now outbox.Table, copied string, err error) {
	rows, err := own.readKnown(ctx, conn, "SELECT")
	t.OID = oid
	if err == nil {
		t.Known, copied = nameOf(&t, rows)
	}
	return t, copied, err
}

// Bind sets by what outboxes are known, for statements on a connection that no [DB] has opened. A table that
// does not exist stays as it is.
func Bind(ctx context.Context, conn *pgx.Conn, where pg.Own, tables []*outbox.Table) error {
	own, err := findOwn(ctx, conn, where)
	for i := 0; err == nil && i < len(tables); i++ {
		err = own.bindOne(ctx, conn, tables[i])
	}
	return err
}

// Bind is [Bind] on the connection of the DB.
func (db *DB) Bind(ctx context.Context, tables ...*outbox.Table) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		for i := 0; err == nil && i < len(tables); i++ {
			err = db.own.bindOne(ctx, conn, tables[i])
		}
		return err
	})
}

func (own *ownTables) bindOne(ctx context.Context, conn *pgx.Conn, t *outbox.Table) error {
	var oid *uint32
	err := conn.QueryRow(ctx, `SELECT to_regclass($1)::oid`, t.SQL()).Scan(&oid)
	if err != nil {
		return explainSchema(t, err)
	}
	if oid == nil {
		return nil
	}
	now, _, err := own.bind(ctx, conn, *t, *oid)
	if err == nil {
		*t = now
	}
	return err
}

// hereSQL is what rows of outbox_known have in common that were written here.
func (own *ownTables) hereSQL() string {
	system := "NULL"
	if own.system != "" {
		system = pg.QuoteLiteral(own.system)
	}
	return fmt.Sprintf(`(SELECT %s::text AS system, d.oid AS database, to_regclass(%s)::oid AS own
		FROM pg_database d WHERE d.datname = current_database())`, system, pg.QuoteLiteral(own.known))
}

// readKnown reads outbox_known: no rows where it does not exist. It fails where the role lacks one of the
// privileges.
func (own *ownTables) readKnown(
	ctx context.Context, conn *pgx.Conn, privileges string,
) (rows []known, err error) {
	if exists, err := own.knows(ctx, conn, privileges); err != nil || !exists {
		return nil, err
	}
	result, _ := conn.Query(ctx, `
		SELECT k.outbox, k.table_oid, k.table_name, k.source,
			(k.system_id, k.database_oid, k.own_oid) IS NOT DISTINCT FROM (h.system, h.database, h.own),
			coalesce(k.system_id = h.system, false),
			NOT EXISTS (SELECT FROM pg_class WHERE oid = k.table_oid),
			coalesce((SELECT d.datname::text FROM pg_database d
				WHERE k.system_id = h.system AND d.oid = k.database_oid AND d.oid <> h.database), ''),
			coalesce(pg_partition_root(k.table_oid)::oid, 0)
		FROM `+own.known+` k, `+own.hereSQL()+` h ORDER BY k.updated_at DESC, k.id`)
	rows, err = pgx.CollectRows(result, func(row pgx.CollectableRow) (k known, err error) {
		err = row.Scan(&k.name, &k.relation, &k.table, &k.source, &k.here, &k.system, &k.gone, &k.copied,
			&k.root)
		return k, err
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", KnownTable, err)
	}
	return rows, nil
}

// knows reports whether outbox_known exists. An application may have a table of that name.
func (own *ownTables) knows(
	ctx context.Context, conn *pgx.Conn, privileges string,
) (exists bool, err error) {
	var lacking string
	err = conn.QueryRow(ctx, `
		SELECT (SELECT count(*) FROM pg_attribute
			WHERE attrelid = to_regclass($1) AND attname IN ('table_name', 'unsettled')) = 2,
			coalesce(string_agg(p, ', '), '')
		FROM unnest(string_to_array($2, ', ')) p WHERE NOT has_table_privilege(to_regclass($1), p)`,
		own.known, privileges).Scan(&exists, &lacking)
	switch {
	case err != nil:
		return false, fmt.Errorf("read %s: %w", KnownTable, err)
	case exists && lacking != "":
		return true, hint.Coded("table-known-privileges", hint.Errorf(
			fmt.Sprintf("GRANT %s ON %s TO %s", lacking, own.known, outbox.QuoteIdent(conn.Config().User)),
			"the role lacks privileges on table %s: %s", KnownTable, lacking))
	}
	return exists, nil
}

// nameProblems are of an outbox that is known by something else than what the configuration says.
func (f *tableFacts) nameProblems(t *outbox.Table, p *check.Findings) {
	p.If(t.Given != "" && t.Known != t.Given && !Replaces(t), "table-other-name",
		hint.Errorf(
			fmt.Sprintf("set outboxes[].name: %s, or leave it out: an outbox keeps its name", t.Known),
			"table %s is known as outbox %s, and outboxes[].name says %s", t.Relation(), t.Known, t.Given))
	p.If(f.copied != "", "table-copied", hint.Errorf(
		fmt.Sprintf("if a relay is to deliver from this database, too: `walpost outbox keep %s`; "+
			"rows that are pending in both are delivered from both", t),
		"this database is a copy of %s, which exists: outbox %s is delivered there", f.copied, t))
}

// Know writes into outbox_known what a table is now. What was computed of another table, other partitions, in
// another database or on another timeline is void. A row that says the same stays as it is. The relay that
// holds the lock calls it; source is the default one.
func (db *DB) Know(ctx context.Context, t *outbox.Table, source string) error {
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		exists, err := db.own.knows(ctx, conn, KnownPrivileges)
		if err != nil || !exists {
			return err
		}
		var written int
		err = conn.QueryRow(ctx, db.own.othersSQL(), t.String(), t.Where, t.Relation()).Scan(&written)
		if err != nil {
			return err
		}
		return conn.QueryRow(ctx, db.own.knowSQL(t), t.String(), t.Where, t.Relation(), source, t.OID).
			Scan(&written)
	})
	if err != nil {
		return fmt.Errorf("write %s: %w", KnownTable, err)
	}
	return nil
}

// Keep has a table be the outbox whose table it was when that was dropped or copied. An outbox that is known
// by its OID stays what it is.
func (db *DB) Keep(ctx context.Context, t *outbox.Table, source string) error {
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := db.own.readKnown(ctx, conn, KnownPrivileges)
		if err == nil {
			t.Known = keptName(t, rows)
		}
		return err
	})
	if err != nil {
		return err
	}
	return db.Know(ctx, t, source)
}

// keptName is the name of the outbox whose table was restored as t. An outbox that has its table still, under
// whatever name, is not t's.
func keptName(t *outbox.Table, rows []known) string {
	name, _ := nameOf(t, rows)
	if slices.ContainsFunc(rows, func(k known) bool { return k.name == name }) {
		return name
	}
	for _, had := range []func(known) bool{
		func(k known) bool { return k.table == t.Relation() },
		func(k known) bool { return k.name == t.FirstName() },
	} {
		for _, k := range rows { // one for each condition; that of an earlier one may name an earlier table
			if k.gone && had(k) && !slices.ContainsFunc(rows, func(other known) bool {
				return other.name == k.name && !other.gone
			}) {
				return k.name
			}
		}
	}
	return name
}

// computedSQL is what the progress of a row k was computed for.
const computedSQL = `(k.system_id, k.database_oid, k.own_oid, k.table_oid, k.journal_oid, ` +
	`k.timeline, k.partitions)`

// othersSQL updates the rows of all other outboxes, which may not be configured now: the present names of
// their tables, and after a dump or a copy their OIDs. A copy on the same server has the same OIDs; after a
// dump the table's name tells it. If the database that was copied still exists, its rows stay as they are
// until an operator answers (walpost outbox keep).
func (own *ownTables) othersSQL() string {
	return strings.NewReplacer(
		"{known}", own.known, "{here}", own.hereSQL(), "{own}", pg.OwnPath, "{every}", everySQL,
	).Replace(`
WITH others AS (
	SELECT k.id, h.system, h.database, h.own, c.oid, n.nspname || '.' || c.relname AS name, w.here
	FROM {known} k CROSS JOIN {here} h
	CROSS JOIN LATERAL (SELECT (k.system_id, k.database_oid, k.own_oid)
		IS NOT DISTINCT FROM (h.system, h.database, h.own) AS here) w
	JOIN pg_class c ON c.oid = CASE
		WHEN w.here OR k.system_id = h.system AND EXISTS (SELECT FROM pg_class WHERE oid = k.table_oid)
			THEN k.table_oid
		WHEN k.table_name <> $3 OR k.outbox = $1 THEN (SELECT min(c.oid)
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
			WHERE n.nspname || '.' || c.relname = k.table_name AND c.relkind IN ('r', 'p'))
		END
	JOIN pg_namespace n ON n.oid = c.relnamespace
	WHERE (k.outbox, k.condition) <> ($1, $2) AND NOT EXISTS (SELECT FROM pg_database d
		WHERE k.system_id = h.system AND d.oid = k.database_oid AND d.oid <> h.database)
), changed AS (
	UPDATE {known} k SET system_id = o.system, database_oid = o.database, own_oid = o.own,
		table_oid = o.oid, table_name = o.name,
		unsettled = CASE WHEN o.here THEN k.unsettled ELSE {every} END
	FROM others o WHERE o.id = k.id AND (NOT o.here OR k.table_name <> o.name)
	RETURNING 1
)
SELECT count(*) FROM changed WHERE {own}`)
}

func (own *ownTables) knowSQL(t *outbox.Table) string {
	excluded := strings.ReplaceAll(computedSQL, "k.", "EXCLUDED.")
	return strings.NewReplacer(
		"{known}", own.known, "{here}", own.hereSQL(), "{table}", pg.QuoteLiteral(t.SQL()),
		"{journal}", pg.QuoteLiteral(own.journal.Entries), "{partitions}", PartitionsSQL(t),
		"{own}", pg.OwnPath, "{every}", everySQL,
		"{was}", computedSQL, "{is}", strings.ReplaceAll(computedSQL, "k.", "n."), "{excluded}", excluded,
		"{set}", strings.ReplaceAll(computedSQL, "k.", "")+" = "+excluded,
	).Replace(`
WITH now AS MATERIALIZED (
	SELECT h.system AS system_id, h.database AS database_oid, h.own AS own_oid,
		to_regclass({table})::oid AS table_oid, to_regclass({journal})::oid AS journal_oid,
		('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int AS timeline,
		{partitions} AS partitions
	FROM {here} h
), replaced AS (
	UPDATE {known} SET table_name = '' WHERE table_name = $3 AND outbox <> $1 RETURNING 1
), noted AS (
	INSERT INTO {known} AS k (outbox, condition, system_id, database_oid, own_oid, table_oid, journal_oid,
		timeline, partitions, table_name, source)
	SELECT $1, $2, n.*, $3, $4 FROM now n WHERE n.table_oid = $5 AND NOT EXISTS (SELECT FROM {known} k
		WHERE k.outbox = $1 AND k.condition = $2 AND {was} IS NOT DISTINCT FROM {is} AND k.table_name = $3)
	ON CONFLICT (outbox, hashtextextended(condition, 0)) DO UPDATE SET {set},
		table_name = EXCLUDED.table_name,
		source = CASE WHEN (k.system_id, k.database_oid)
				IS NOT DISTINCT FROM (EXCLUDED.system_id, EXCLUDED.database_oid)
			THEN k.source ELSE EXCLUDED.source END,
		unsettled = CASE WHEN {was} IS NOT DISTINCT FROM {excluded} THEN k.unsettled ELSE {every} END,
		updated_at = now()
	RETURNING 1
)
SELECT (SELECT count(*) FROM replaced) + (SELECT count(*) FROM noted) WHERE {own}`)
}

// PartitionsSQL is a hash of a table's partitions and of the transactions that attached them, as outbox_known
// has it: one that came off and back on is another one.
func PartitionsSQL(t *outbox.Table) string {
	return fmt.Sprintf(`(SELECT hashtextextended(
			coalesce(string_agg(concat(p.relid::oid, ' ', i.xmin), ' ' ORDER BY p.relid::oid), ''), 0)
		FROM pg_partition_tree(to_regclass(%s)) p LEFT JOIN pg_inherits i ON i.inhrelid = p.relid)`,
		pg.QuoteLiteral(t.SQL()))
}

// ByOID returns the tables by their OIDs, and by those of their partitions: a table may have become one.
func (db *DB) ByOID(ctx context.Context, tables []*outbox.Table) (map[uint32]*outbox.Table, error) {
	all := map[uint32]*outbox.Table{}
	for _, t := range tables {
		all[t.OID] = t
		err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
			rows, _ := conn.Query(ctx, `SELECT relid::oid FROM pg_partition_tree($1::oid::regclass)`, t.OID)
			var oid uint32
			_, err := pgx.ForEachRow(rows, []any{&oid}, func() error { all[oid] = t; return nil })
			return err
		})
		if err != nil {
			return nil, fmt.Errorf("read the partitions of %s: %w", t, err)
		}
	}
	return all, nil
}

// DefaultSource is the source that relays of this database had when they began and the configuration named
// none; "" where none is known. It fails where the role lacks one of the privileges on outbox_known.
func (db *DB) DefaultSource(ctx context.Context, privileges string) (source string, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, err := db.own.readKnown(ctx, conn, privileges)
		here := slices.IndexFunc(rows, func(k known) bool { return k.here })
		if here >= 0 {
			source = rows[here].source
		}
		return err
	})
	return source, err
}
