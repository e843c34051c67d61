package table

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// CheckDirect reports an error where connections go through a pooler that hands
// one server session to several clients: the advisory lock would be nobody's.
// It is proven, not guessed: two open connections are two server processes, and
// each stays with its own. It comes before [Open] and sets nothing, because the
// session that it would change may be another client's next.
func CheckDirect(ctx context.Context, cfg Config) error {
	return explainConnect(pg.CheckDirect(ctx, cfg.connection()))
}

// CheckTable reads the outbox table's shape and reports what does not fit the
// layout and the mark, and sets what [outbox.Table] says of it. It changes
// nothing in the database.
func (db *DB) CheckTable(ctx context.Context, t *outbox.Table) error {
	problems, others, err := db.TableProblems(ctx, t)
	if err != nil {
		return err
	}
	return append(problems, others...).FirstError()
}

// TableProblems are all that [DB.CheckTable] reports the first of. Those of rows that were delivered with
// another mark are asked for where there are no others.
func (db *DB) TableProblems(
	ctx context.Context, t *outbox.Table,
) (problems, others check.Findings, err error) {
	*t, problems, err = db.Inspect(ctx, t)
	if err == nil && len(problems) == 0 { // the columns are there, and can be read
		others, err = db.otherMarks(ctx, t)
	}
	return problems, others, err
}

// Reach fails where a lock of another session keeps a table from being read.
func (db *DB) Reach(ctx context.Context, t *outbox.Table) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SELECT FROM `+t.SQL()+` LIMIT 0`)
		return err
	})
}

// Inspect is what TableProblems reports first, and the table as it is now. It leaves t as it is, so that it
// may be asked while statements run.
func (db *DB) Inspect(ctx context.Context, t *outbox.Table) (now outbox.Table, p check.Findings, err error) {
	var f tableFacts
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
		if f, err = readTable(ctx, conn, t, db.own.deadLetters); err != nil {
			return err
		}
		now, f.copied, err = db.own.bind(ctx, conn, *t, f.oid)
		if f.unknown = err; err != nil && hint.CodeOf(err) == "" {
			return err
		}
		t = &now
		if err = f.readHashes(ctx, conn, t); err != nil {
			return err
		}
		if err = f.readStates(ctx, conn, t); err != nil {
			return err
		}
		if Journals(t) {
			err = f.appendOnly.read(ctx, conn, t, &db.own)
		} else if err = f.readJournaled(ctx, conn, t, &db.own); err == nil {
			err = f.identity.read(ctx, conn, t)
		}
		if err != nil {
			return err
		}
		now.Partitions, now.Partitioned = 0, f.kind == "p" && !Journals(t) // whose rows do not move
		if now.Partitioned {
			err = conn.QueryRow(ctx, `SELECT `+PartitionsSQL(t)).Scan(&now.Partitions)
		}
		if err != nil {
			return fmt.Errorf("read the partitions of %s: %w", t, err)
		}
		return f.readFilter(ctx, conn, t)
	})
	if hint.CodeOf(err) != "" || IsLocked(err) { // nothing more can be asked
		p.Failed(check.Error, "table-unreadable", err)
		return *t, p, nil
	}
	if err != nil {
		return *t, nil, err
	}
	if idType := f.types[t.Layout.Columns[outbox.ID]]; idType != "" {
		now.IDType = idType
	}
	now.PartitionKey, now.KeyType = outbox.ID, ""
	for field := outbox.TenantID; field <= outbox.LastHeader && Changes(t); field++ {
		if column := t.Layout.Columns[field]; column != "" && column == f.partitionKey {
			now.PartitionKey, now.KeyType = field, f.types[column]
		}
	}
	if Journals(t) {
		now.Journal = db.own.journal
	}
	now.Layout.States = f.states
	if f.filterErr == nil {
		now.Filter = f.filter
	}
	for field := outbox.ID; field < outbox.NumFields; field++ {
		if typ := f.types[t.Layout.Columns[field]]; typ != "" {
			now.Text[field], now.JSON[field] = isText(typ), isJSON(typ)
		}
	}
	f.kindProblems(t, &p)
	f.nameProblems(t, &p)
	f.columnProblems(t, &p)
	if Journals(t) {
		f.appendOnly.problems(t, &db.own, &p)
	} else {
		f.journaledProblems(t, &db.own, &p)
		f.identity.problems(t, &p)
	}
	f.privilegeProblems(t, &p)
	p.IfShared(f.unknown != nil, "table-known-privileges", f.unknown)
	return now, p, nil
}

func isJSON(typ string) bool { return typ == "json" || typ == "jsonb" }

// isText reports whether a type is text or varchar.
func isText(typ string) bool {
	return typ == "text" || strings.HasPrefix(typ, "character varying") && !strings.HasSuffix(typ, "[]")
}

// ErrTableChanged means that a table is not the one that the statements were made for.
var ErrTableChanged = errors.New("the table has changed")

// checkIDType returns ErrTableChanged where the id column is not of the type that t says, or is not there.
func (db *DB) checkIDType(ctx context.Context, t *outbox.Table) error {
	var now string
	err := db.QueryRow(ctx, []any{&now}, `SELECT coalesce((
		SELECT format_type(atttypid, atttypmod) FROM pg_attribute
		WHERE attrelid = to_regclass($1) AND attname = $2 AND NOT attisdropped), '')`,
		t.SQL(), t.Layout.Columns[outbox.ID])
	if err != nil {
		return fmt.Errorf("read the id type of %s: %w", t, err)
	}
	if now != t.IDType {
		return fmt.Errorf("%w: %s of %s was %s, and is %s",
			ErrTableChanged, t.Layout.Columns[outbox.ID], t, t.IDType, cmp.Or(now, "not there"))
	}
	return nil
}

// explainRefusal finds out whether the server refused a statement because of the id column's type, or lets no
// row be changed any more.
func (db *DB) explainRefusal(ctx context.Context, t *outbox.Table, err error) error {
	if pg.Code(err) == "" || IsTemporary(err) || !db.Alive() {
		return err
	}
	if lacksIdentity(err) {
		var f identityFacts
		asked := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error { return f.read(ctx, conn, t) })
		if asked == nil && f.refused != nil {
			return fmt.Errorf("%w: %w", ErrTableChanged, err)
		}
	}
	if changed := db.checkIDType(ctx, t); errors.Is(changed, ErrTableChanged) {
		return fmt.Errorf("%w: %w", changed, err)
	}
	return err
}

type tableFacts struct {
	oid               uint32
	copied            string // see nameOf
	unknown           error  // why nothing tells by what the outbox is known
	kind, persistence string
	rowSecurity       bool
	partitionKey      string // the first column of the partition key, where its type is PostgreSQL's own
	types             map[string]string
	generated         map[string]bool
	role              string
	idIndexed         bool
	// idForeign: ids are compared by operators that are not pg_catalog's, or have a type that is not.
	idForeign bool
	// states are those of the layout as the status column renders them, and stateErr why it cannot.
	states   [outbox.NumStates]string
	stateErr error
	// filter is the condition of the outbox as the server words it, and filterErr why it is none.
	filter    string
	filterErr error
	// required: the status column takes no NULL and has no default.
	required  bool
	dlqExists bool
	// unhashed are the types of columns that rows are found by a hash of, and that have none.
	unhashed map[outbox.Field]string
	// lacking are privileges on the table, and lackingDLQ on the dead letters.
	lacking, lackingDLQ []string
	// appendOnly is read where mark journal needs it.
	appendOnly appendOnlyFacts
	// identity is read with the other marks.
	identity identityFacts
	// journaled: the journal has rows of a table with another mark. refusing are the table, or partitions of
	// it, that have a trigger which refuses UPDATE.
	journaled bool
	refusing  []string
}

func readTable(ctx context.Context, conn *pgx.Conn, t *outbox.Table, dead string) (f tableFacts, err error) {
	err = conn.QueryRow(ctx, `SELECT c.oid, c.relkind::text, c.relpersistence::text,
			row_security_active(c.oid), current_user::text,
			coalesce((SELECT a.attname::text FROM pg_partitioned_table p
				JOIN pg_attribute a ON a.attrelid = p.partrelid AND a.attnum = p.partattrs[0]
				JOIN pg_type y ON y.oid = a.atttypid JOIN pg_opclass o ON o.oid = p.partclass[0]
				WHERE p.partrelid = c.oid AND (p.partstrat <> 'h' OR p.partnatts = 1)
					AND y.typnamespace = 'pg_catalog'::regnamespace
					AND o.opcnamespace = 'pg_catalog'::regnamespace), '')
		FROM pg_class c WHERE c.oid = to_regclass($1)`, t.SQL()).
		Scan(&f.oid, &f.kind, &f.persistence, &f.rowSecurity, &f.role, &f.partitionKey)
	if errors.Is(err, pgx.ErrNoRows) {
		return f, hint.Coded("table-missing",
			hint.Errorf(adviseMissing(ctx, conn, t), "table %s does not exist", t.Relation()))
	}
	if err != nil {
		return f, explainSchema(t, err)
	}
	if err = f.readColumns(ctx, conn, t); err != nil {
		return f, err
	}
	err = conn.QueryRow(ctx, `SELECT count(*) > 0,
			count(*) > 0 AND NOT coalesce(bool_or(EXISTS (
				SELECT FROM pg_opclass c JOIN pg_amop m ON m.amopfamily = c.opcfamily
				JOIN pg_operator o ON o.oid = m.amopopr
				WHERE c.oid = i.indclass[0] AND o.oprname = '='
					AND o.oprnamespace = 'pg_catalog'::regnamespace)), false)
			OR EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = to_regclass($1) AND a.attname = $2
				AND `+pg.ForeignTypeSQL("a.atttypid")+`)
		FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
		WHERE i.indrelid = to_regclass($1) AND i.indisvalid AND i.indpred IS NULL AND a.attname = $2`,
		t.SQL(), t.Layout.Columns[outbox.ID]).Scan(&f.idIndexed, &f.idForeign)
	if err != nil {
		return f, fmt.Errorf("read indexes of %s: %w", t, err)
	}
	return f, f.readPrivileges(ctx, conn, t, dead)
}

// explainSchema says what is wrong where a role has no right to look a table's name up.
func explainSchema(t *outbox.Table, err error) error {
	err = fmt.Errorf("read table %s: %w", t.Relation(), err)
	if pg.Code(err) != pgerrcode.InsufficientPrivilege {
		return err
	}
	return hint.Coded("table-schema", hint.Wrap(err,
		fmt.Sprintf("as the schema's owner: GRANT USAGE ON SCHEMA %s TO the role of postgres.url",
			outbox.QuoteIdent(t.Schema))))
}

// readPrivileges asks for what marking, recording and moving to the dead letters do to the table,
// column by column, and to the dead letters: every row may become one.
func (f *tableFacts) readPrivileges(ctx context.Context, conn *pgx.Conn, t *outbox.Table, dead string) error {
	var canSelect, canLock, canDelete, canWrite, canRead, canAddLetter bool
	var columns []string
	for _, f := range Writes(t) {
		columns = append(columns, t.Layout.Columns[f])
	}
	err := conn.QueryRow(ctx, `SELECT has_table_privilege(to_regclass($1), 'SELECT'),
			has_table_privilege(to_regclass($1), 'DELETE'),
			has_any_column_privilege(to_regclass($1), 'UPDATE'),
			coalesce((SELECT bool_and(has_column_privilege(attrelid, attname, 'UPDATE')) FROM pg_attribute
				WHERE attrelid = to_regclass($1) AND attname = ANY($3) AND NOT attisdropped), true),
			to_regclass($2) IS NOT NULL, coalesce(has_table_privilege(to_regclass($2), 'SELECT'), false),
			coalesce(has_table_privilege(to_regclass($2), 'INSERT'), false)`, t.SQL(), dead, columns).
		Scan(&canSelect, &canDelete, &canLock, &canWrite, &f.dlqExists, &canRead, &canAddLetter)
	if err != nil {
		return fmt.Errorf("read privileges on %s: %w", t, err)
	}
	f.lacking = without("SELECT", canSelect, f.lacking)
	if Changes(t) {
		// FOR UPDATE is satisfied by any column.
		f.lacking = without(updatePrivilege(UpdateColumns(t)), canWrite && canLock, f.lacking)
		f.lacking = without("DELETE", canDelete || !Deletes(t), f.lacking)
	}
	f.lackingDLQ = without("SELECT", canRead, f.lackingDLQ)
	f.lackingDLQ = without("INSERT", canAddLetter, f.lackingDLQ)
	return nil
}

func without(privilege string, has bool, lacking []string) []string {
	if has {
		return lacking
	}
	return append(lacking, privilege)
}

func updatePrivilege(columns []string) string {
	quoted := make([]string, len(columns))
	for i, c := range columns {
		quoted[i] = outbox.QuoteIdent(c)
	}
	return "UPDATE (" + strings.Join(quoted, ", ") + ")"
}

func (f *tableFacts) readColumns(ctx context.Context, conn *pgx.Conn, t *outbox.Table) error {
	f.types, f.generated = map[string]string{}, map[string]bool{}
	columns, err := pg.ReadColumns(ctx, conn, t)
	for _, c := range columns {
		f.types[c.Name], f.generated[c.Name] = c.Type, c.Generated
	}
	return err
}

// readHashes asks the server whether it can hash each column by whose hash the relay, or its shard, finds
// rows.
func (f *tableFacts) readHashes(ctx context.Context, conn *pgx.Conn, t *outbox.Table) error {
	var fields []outbox.Field
	if findsAggregates(t) {
		fields = aggregateFields[:]
	} else if !t.Shard.All() {
		fields = []outbox.Field{outbox.AggregateID}
	}
	if !t.Shard.All() {
		fields = append([]outbox.Field{outbox.ID}, fields...)
	}
	f.unhashed = map[outbox.Field]string{}
	for _, field := range fields {
		column := t.Layout.Columns[field]
		if f.types[column] == "" {
			continue // it is not mapped, or missing
		}
		typ, _, err := readColumnType(ctx, conn, t, field)
		if err != nil {
			return err
		}
		// The table itself may be locked.
		_, err = conn.Exec(ctx, "SELECT "+outbox.HashRecordSQL("NULL::"+typ))
		switch {
		case pg.Code(err) == pgerrcode.UndefinedFunction:
			f.unhashed[field] = f.types[column]
		case pg.Code(err) == pgerrcode.InsufficientPrivilege:
			// No USAGE on the type's schema: rows are read and hashed without.
		case err != nil:
			return fmt.Errorf("hash a NULL of %s of %s: %w", called(column, field), t, err)
		}
	}
	return nil
}

func (f *tableFacts) kindProblems(t *outbox.Table, p *check.Findings) {
	table := f.kind == "r" || f.kind == "p"
	p.If(!table, "table-kind",
		hint.Errorf("name an ordinary or a partitioned table in outboxes[].table", "%s is not a table", t))
	p.If(table && f.persistence != "p", "table-unlogged",
		hint.Errorf(fmt.Sprintf("ALTER TABLE %s SET LOGGED", t.SQL()),
			"table %s is unlogged: its rows never reach the WAL", t))
	p.If(table && f.rowSecurity, "table-row-security",
		hint.Errorf(
			fmt.Sprintf("ALTER ROLE %s BYPASSRLS, or make it the table's owner", outbox.QuoteIdent(f.role)),
			"row-level security on %s would hide rows from the relay", t))
}

// CheckColumns refuses layouts with columns that their tables lack, before a command changes anything. Of a
// table that does not exist it says nothing.
func CheckColumns(ctx context.Context, conn *pgx.Conn, tables []*outbox.Table) error {
	for _, t := range tables {
		var f tableFacts
		var p check.Findings
		if err := f.readColumns(ctx, conn, t); err != nil {
			return err
		}
		if len(f.types) > 0 {
			f.mappedProblems(t, &p)
		}
		if err := p.FirstError(); err != nil {
			return err
		}
	}
	return nil
}

// mappedProblems are columns of the layout that the table lacks, or that the WAL never has.
func (f *tableFacts) mappedProblems(t *outbox.Table, p *check.Findings) {
	var missing []string
	for field := outbox.ID; field < outbox.NumFields; field++ {
		column := t.Layout.Columns[field]
		if column != "" && f.types[column] == "" && !t.Layout.InJournal(field) {
			missing = append(missing, called(column, field))
		}
		p.If(f.generated[column], "table-generated-column",
			hint.Errorf("have a trigger fill a plain column, or leave the field out of outboxes[].layout",
				"column %s of %s is a generated one: pgoutput leaves those out", called(column, field), t))
	}
	p.If(len(missing) > 0, "table-columns",
		hint.Errorf("add the columns (`walpost migrate print` shows the canonical ones), "+
			"or say in outboxes[].layout what the table calls them",
			"table %s lacks what layout %q needs: %s", t, t.Layout.Name, strings.Join(missing, ", ")))
}

func (f *tableFacts) columnProblems(t *outbox.Table, p *check.Findings) {
	f.mappedProblems(t, p)
	for _, field := range []outbox.Field{outbox.AvailableAt, outbox.ProcessedAt} {
		column := t.Layout.Columns[field]
		typ := f.types[column]
		p.If(column != "" && typ != "" && !strings.HasPrefix(typ, "timestamp"), "table-column-type",
			hint.Errorf("give the table a column of type timestamptz for it, "+
				"or leave the field out of outboxes[].layout",
				"column %s of %s has type %s, want timestamptz", called(column, field), t, typ))
	}
	for field := outbox.ID; field < outbox.NumFields; field++ {
		p.If(f.unhashed[field] != "", "table-column-type",
			hint.Errorf("give the column a type that PostgreSQL can hash, "+
				"such as text, uuid, bigint or jsonb",
				"column %s of %s has type %s, which has no hash function: rows could not be found by it",
				called(t.Layout.Columns[field], field), t, f.unhashed[field]))
	}
	p.If(Keeps(t) && len(t.Layout.MarkFields()) == 0, "table-mark",
		hint.Errorf("use outboxes[].mark: delete, name a status as in {set: {status: 2}}, "+
			"or map processed_at to a timestamptz column",
			"mark \"update\" needs a processed_at column, layout %q has none", t.Layout.Name))
	f.statusProblems(t, p)
	p.If(f.filterErr != nil, "table-where", f.filterErr)
	id := t.Layout.Columns[outbox.ID]
	p.If(f.types[id] != "" && !f.idIndexed, "table-id-index",
		hint.Errorf(fmt.Sprintf("CREATE UNIQUE INDEX CONCURRENTLY ON %s (%s)", t.SQL(), t.Column(outbox.ID)),
			"table %s has no index that begins with %q: every mark would scan it", t, id))
	p.If(f.idForeign, "table-id-index",
		hint.Errorf(
			fmt.Sprintf("give column %s a type of PostgreSQL's own, such as uuid or text",
				t.Column(outbox.ID)),
			"the ids of %s have type %s, which is not PostgreSQL's own: "+
				"its operators and casts are not called", t, f.types[id]))
}

// called is a column's name, with the field's where they differ.
func called(column string, field outbox.Field) string {
	if column == field.String() {
		return strconv.Quote(column)
	}
	return fmt.Sprintf("%q (%s)", column, field)
}

func (f *tableFacts) privilegeProblems(t *outbox.Table, p *check.Findings) {
	role := outbox.QuoteIdent(f.role)
	p.IfShared(!f.dlqExists, "table-dead-letters-missing",
		hint.Errorf(fmt.Sprintf("run `walpost migrate up` as the tables' owner; if it is there already, "+
			"GRANT USAGE ON its schema TO %s, and name that in postgres.schema", role),
			"table %s does not exist: rows of %s that cannot be delivered go there", DeadLetters, t))
	lackingDLQ := f.lackingDLQ
	if !f.dlqExists {
		lackingDLQ = nil
	}
	var lacks, grants []string
	own := false // it lacks privileges not only on the dead letters
	for _, on := range append([]lackingPrivileges{
		{t.String(), t.SQL(), strings.Join(f.lacking, ", ")},
		{DeadLetters, DeadLetters, strings.Join(lackingDLQ, ", ")},
	}, f.appendOnly.lacking...) {
		if on.privileges != "" {
			own = own || on.name != DeadLetters
			lacks = append(lacks, on.privileges+" on "+on.name)
			grants = append(grants, fmt.Sprintf("GRANT %s ON %s TO %s", on.privileges, on.sql, role))
		}
	}
	lacking := hint.Errorf("as the tables' owner: "+strings.Join(grants, "; "),
		"role %q may not relay %s: it lacks %s", f.role, t, strings.Join(lacks, ", and "))
	p.If(own, "table-privileges", lacking)
	p.IfShared(!own && len(lacks) > 0, "table-privileges", lacking)
}
