package table

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// appendOnlyFacts are what a journal relies on: ids come once, in the order in which they are drawn, and rows
// are not changed.
type appendOnlyFacts struct {
	journal bool // its tables exist
	bigint  bool // the type of the ids
	always  bool // the ids are GENERATED ALWAYS AS IDENTITY
	// sequence is where they come from, quoted, or "". ordered: one by one, upwards from 1 or more, once.
	sequence string
	ordered  bool
	// last is the id before the sequence's next one, where it is readable, and settled an id up to which rows
	// are delivered.
	last, settled int64
	readable      bool
	// Triggers refuse changes, also those of a session that replays other servers' changes.
	refusesUpdate, refusesTruncate bool
	// marked: rows were delivered with another mark, and the journal has none.
	marked bool
	// lacking are privileges, by the object.
	lacking []lackingPrivileges
}

// nextIDs are so many that none of them may have an entry.
const nextIDs = 1_000_000_000

// The bits of pg_trigger.tgtype.
const (
	triggerRow, triggerBefore      int16 = 1 << 0, 1 << 1
	triggerUpdate, triggerTruncate int16 = 1 << 4, 1 << 5
)

type lackingPrivileges struct{ name, sql, privileges string }

// AppendOnly is walpost's function for triggers that refuse changes.
const AppendOnly = "outbox_append_only"

// The triggers that [AppendOnlySQL] makes.
const (
	noUpdateTrigger   = "outbox_no_update"
	noTruncateTrigger = "outbox_no_truncate"
)

// AppendOnlySQL are the statements that make a table append-only, for a new one. function is that of the
// triggers, quoted.
func AppendOnlySQL(t *outbox.Table, function string) []string {
	return []string{
		fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s SET GENERATED ALWAYS", t.SQL(), t.Column(outbox.ID)),
		noUpdateSQL(t, function), alwaysSQL(t, noUpdateTrigger),
		noTruncateSQL(t, function), alwaysSQL(t, noTruncateTrigger),
	}
}

func noUpdateSQL(t *outbox.Table, function string) string {
	return fmt.Sprintf("CREATE OR REPLACE TRIGGER %s BEFORE UPDATE ON %s FOR EACH ROW EXECUTE FUNCTION %s()",
		noUpdateTrigger, t.SQL(), function)
}

func noTruncateSQL(t *outbox.Table, function string) string {
	return fmt.Sprintf(
		"CREATE OR REPLACE TRIGGER %s BEFORE TRUNCATE ON %s FOR EACH STATEMENT EXECUTE FUNCTION %s()",
		noTruncateTrigger, t.SQL(), function)
}

func alwaysSQL(t *outbox.Table, trigger string) string {
	return fmt.Sprintf("ALTER TABLE %s ENABLE ALWAYS TRIGGER %s", t.SQL(), trigger)
}

func (f *appendOnlyFacts) read(ctx context.Context, conn *pgx.Conn, t *outbox.Table, own *ownTables) error {
	err := conn.QueryRow(ctx, `SELECT a.atttypid = 'bigint'::regtype, a.attidentity = 'a',
			coalesce(quote_ident(n.nspname) || '.' || quote_ident(c.relname), ''),
			coalesce(s.seqcache = 1 AND s.seqincrement > 0 AND NOT s.seqcycle AND s.seqmin > 0, false),
			coalesce(has_sequence_privilege(c.oid, 'SELECT'), false)
		FROM pg_attribute a
		LEFT JOIN (pg_depend d JOIN pg_sequence s ON s.seqrelid = d.objid
				JOIN pg_class c ON c.oid = d.objid JOIN pg_namespace n ON n.oid = c.relnamespace)
			ON d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass
				AND d.refobjid = a.attrelid AND d.refobjsubid = a.attnum AND d.deptype = 'i'
		WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND NOT a.attisdropped`,
		t.SQL(), t.Layout.Columns[outbox.ID]).
		Scan(&f.bigint, &f.always, &f.sequence, &f.ordered, &f.readable)
	if errors.Is(err, pgx.ErrNoRows) { // a column is missing, which is told elsewhere
		f.bigint, f.always, f.ordered, err = true, true, true, nil
	}
	if err == nil {
		err = f.readSequence(ctx, conn)
	}
	if err != nil {
		return fmt.Errorf("read the ids of %s: %w", t, err)
	}
	if err := f.readTriggers(ctx, conn, t, own.appendOnly); err != nil {
		return err
	}
	return f.readJournal(ctx, conn, t, own)
}

func (f *appendOnlyFacts) readSequence(ctx context.Context, conn *pgx.Conn) error {
	if !f.readable {
		return nil
	}
	// Its next id may have been set, and not drawn yet.
	return conn.QueryRow(ctx, `SELECT last_value - (NOT is_called)::int FROM `+f.sequence).Scan(&f.last)
}

// readTriggers asks for triggers with the function: on the table and, for rows, on each of its partitions.
func (f *appendOnlyFacts) readTriggers(
	ctx context.Context, conn *pgx.Conn, t *outbox.Table, function string,
) error {
	err := conn.QueryRow(ctx, `
		WITH refusing AS (
			SELECT g.tgrelid, g.tgtype FROM pg_trigger g
			WHERE g.tgfoid = to_regproc($2) AND g.tgenabled = 'A' AND g.tgqual IS NULL
				AND g.tgattr = ''::int2vector
		)
		SELECT (SELECT bool_and(EXISTS (
				SELECT FROM refusing g WHERE g.tgrelid = r.id AND g.tgtype & $3 = $3))
			FROM (SELECT to_regclass($1) UNION SELECT relid FROM pg_partition_tree(to_regclass($1))) r(id)),
			EXISTS (SELECT FROM refusing g WHERE g.tgrelid = to_regclass($1)
				AND g.tgtype & $4 = $4 AND g.tgtype & 1 = 0)`,
		t.SQL(), function, triggerRow|triggerBefore|triggerUpdate, triggerBefore|triggerTruncate).
		Scan(&f.refusesUpdate, &f.refusesTruncate)
	if err != nil {
		return fmt.Errorf("read triggers of %s: %w", t, err)
	}
	return nil
}

// Sequences are those of the ids of tables with a journal, quoted. A relay reads them.
func Sequences(ctx context.Context, conn *pgx.Conn, tables []*outbox.Table) (all []string, err error) {
	for _, t := range tables {
		if !Journals(t) {
			continue
		}
		var sequence *string // NULL: the ids are not generated
		err = conn.QueryRow(ctx, `SELECT pg_get_serial_sequence($1, $2)`,
			t.SQL(), t.Layout.Columns[outbox.ID]).Scan(&sequence)
		if err != nil {
			return nil, fmt.Errorf("find the sequence of %s: %w", t, err)
		}
		if sequence != nil {
			all = append(all, *sequence)
		}
	}
	return all, nil
}

// JournalPrivileges are what a relay needs on walpost's tables.
var JournalPrivileges = []struct{ Table, Privileges string }{
	{JournalEntries, "SELECT, INSERT, UPDATE, DELETE"},
	{JournalDeferred, "SELECT, INSERT, UPDATE, DELETE"},
	{KnownTable, KnownPrivileges},
}

func (f *appendOnlyFacts) readJournal(
	ctx context.Context, conn *pgx.Conn, t *outbox.Table, own *ownTables,
) error {
	names := []string{own.journal.Entries, own.journal.Deferred, own.known}
	f.journal = true
	for i, need := range JournalPrivileges {
		var exists bool
		var lacking string
		err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL, coalesce(string_agg(p, ', '), '')
			FROM unnest(string_to_array($2, ', ')) p WHERE NOT has_table_privilege(to_regclass($1), p)`,
			names[i], need.Privileges).Scan(&exists, &lacking)
		if err != nil {
			return fmt.Errorf("read privileges on %s: %w", need.Table, err)
		}
		f.journal = f.journal && exists
		if lacking != "" {
			f.lacking = append(f.lacking, lackingPrivileges{need.Table, names[i], lacking})
		}
	}
	if f.sequence != "" && !f.readable {
		f.lacking = append(f.lacking, lackingPrivileges{
			"sequence " + f.sequence, "SEQUENCE " + f.sequence, "SELECT",
		})
	}
	if !f.journal || len(f.lacking) > 0 {
		return nil
	}
	// A progress that is void says nothing of the next ids: entries do.
	err := conn.QueryRow(ctx, `SELECT coalesce((SELECT max(`+SettledSQL+`) FROM `+own.known+` k
			WHERE k.outbox = $1), (SELECT max(upper(r)) - 1 FROM `+own.journal.Entries+` j, unnest(j.ids) r
			WHERE j.outbox = $1 AND range_merge(j.ids) && int8range($2, $3) AND r && int8range($2, $3)), 0)`,
		t.String(), f.last+1, min(f.last, math.MaxInt64-2*nextIDs)+nextIDs).Scan(&f.settled)
	if err == nil && f.last < f.settled { // rows may have been inserted and delivered meanwhile
		err = f.readSequence(ctx, conn)
	}
	if err == nil && t.Layout.Unjournaled != "" {
		err = f.readMarks(ctx, conn, t, own)
	}
	if err != nil {
		return fmt.Errorf("read the progress of %s: %w", t, err)
	}
	return nil
}

func (f *appendOnlyFacts) problems(t *outbox.Table, own *ownTables, p *check.Findings) {
	p.If(!f.bigint, "table-append-only", hint.Errorf(
		"use outboxes[].mark: update or delete, which take any type",
		"mark \"journal\" needs ids of type bigint, and those of %s are not", t))
	p.If(!f.journal, "table-journal-missing", hint.Errorf(
		"run `walpost migrate up` as the tables' owner; if they are there in another schema, name that in "+
			"postgres.schema; one that was dropped is made as `walpost migrate print` shows",
		"tables %s, %s and %s do not all exist: mark \"journal\" of %s needs them",
		JournalEntries, JournalDeferred, KnownTable, t))
	var lacks, advice []string
	lack := func(is bool, what string, statements ...string) {
		if is {
			lacks, advice = append(lacks, what), append(advice, statements...)
		}
	}
	id := fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s", t.SQL(), t.Column(outbox.ID))
	generate := []string{id + " SET GENERATED ALWAYS"}
	if f.sequence == "" {
		generate = []string{
			id + " DROP DEFAULT", id + " ADD GENERATED ALWAYS AS IDENTITY (START WITH <more than every id>)",
		}
	}
	if !f.bigint {
		return
	}
	function := own.appendOnly
	lack(!f.always, "its ids are not GENERATED ALWAYS AS IDENTITY", generate...)
	lack(f.sequence != "" && !f.ordered, "their sequence does not count upwards from 1 or more with CACHE 1",
		"ALTER SEQUENCE "+f.sequence+" CACHE 1 INCREMENT 1 MINVALUE 1 NO CYCLE")
	lack(!f.refusesUpdate, "no trigger refuses every UPDATE",
		noUpdateSQL(t, function), alwaysSQL(t, noUpdateTrigger))
	lack(!f.refusesTruncate, "no trigger refuses every TRUNCATE",
		noTruncateSQL(t, function), alwaysSQL(t, noTruncateTrigger))
	p.If(len(lacks) > 0, "table-append-only", hint.Errorf(
		"as its owner: "+strings.Join(advice, "; "),
		"mark \"journal\" is for tables that are append-only, and %s is not: %s",
		t, strings.Join(lacks, ", ")))
	p.If(f.marked, "table-other-marks", hint.Errorf(
		fmt.Sprintf("archive them, and then DELETE FROM %s WHERE %s IS NOT NULL, or keep the mark",
			t.SQL(), outbox.QuoteIdent(t.Layout.Unjournaled)),
		"rows of %s were delivered with another mark, and the journal does not have them: "+
			"they would be delivered again", t))
	p.If(f.readable && f.last < f.settled, "table-ids-again", hint.Errorf(
		fmt.Sprintf("SELECT setval('%s', %d), before more rows are inserted; those that were inserted since "+
			"are not delivered from the table", strings.ReplaceAll(f.sequence, "'", "''"), f.settled),
		"the sequence of %s stands at %d, and rows up to id %d are delivered: "+
			"new rows would be taken for those",
		t, f.last, f.settled))
}
