package deadletter

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// target is an outbox that dead letters go back to.
type target struct {
	table   *outbox.Table
	letters string // the dead letters, with their schema
	columns map[string]targetColumn
	check   error // why no dead letter may go back; nil where they may
}

// retriedNote marks the row as held: the table delivers it, behind rows that were inserted meanwhile.
const retriedNote = table.Held + "a dead letter that is tried again"

type targetColumn struct {
	Name      string
	Type      string // without a length: a value that is too long is an error, and is not cut
	Generated bool
	Foreign   bool // neither a type in pg_catalog nor a domain over one
}

// target finds the outbox and reads its columns, once.
func (q *Queue) target(ctx context.Context, tx pgx.Tx, name string) (*target, error) {
	if t := q.targets[name]; t != nil {
		return t, nil
	}
	t := &target{letters: q.table, columns: map[string]targetColumn{}}
	for _, o := range q.cfg.Outboxes {
		if o.String() == name {
			t.table = o
		}
	}
	q.targets[name] = t
	if t.table == nil {
		t.check = hint.Errorf("add it to outboxes in the configuration that this command reads",
			"outbox %q is not configured", name)
		return t, nil
	}
	rows, _ := tx.Query(ctx, `
		SELECT attname::text, format_type(atttypid, -1), attgenerated <> '', `+pg.ForeignTypeSQL("atttypid")+`
		FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped`,
		t.table.SQL())
	columns, err := pgx.CollectRows(rows, pgx.RowToStructByPos[targetColumn])
	if err != nil {
		return nil, err
	}
	for _, c := range columns {
		t.columns[c.Name] = c
	}
	if table.Journals(t.table) {
		if t.table.Journal, err = table.FindJournal(ctx, q.conn, q.cfg.Own); err != nil {
			return nil, err
		}
	}
	if len(columns) == 0 {
		t.check = hint.Errorf("create it again, or discard its dead letters", "table %s does not exist", name)
		return t, nil
	}
	return t, nil
}

// valueSQL is the column's value in an original row. For a foreign type it calls json_populate_record, which
// uses the type's input function: the type's owner may have defined a cast from text, which must not be
// called.
func (c targetColumn) valueSQL(original string, t *outbox.Table) string {
	text := original + " ->> " + pg.QuoteLiteral(c.Name)
	if !c.Foreign {
		return fmt.Sprintf("(%s)::%s", text, c.Type)
	}
	return fmt.Sprintf("(json_populate_record(NULL::%s, json_build_object(%s, %s))).%s",
		t.SQL(), pg.QuoteLiteral(c.Name), text, outbox.QuoteIdent(c.Name))
}

// insertSQL moves rows whose originals have these columns. Columns that the table got later take their
// defaults. It refuses an original with a column that the table lacks: the value would be lost.
func (t *target) insertSQL(originals []string) (sql string, refusal error) {
	if t.check != nil {
		return "", t.check
	}
	id := t.table.Layout.Columns[outbox.ID]
	if slices.Contains(originals, table.OmittedKey) {
		advice := "insert a smaller event, and discard the dead letter"
		if table.Changes(t.table) {
			advice = fmt.Sprintf("if the row is still in its outbox, make it small enough there, "+
				"with UPDATE %s SET %s, and discard the dead letter",
				t.table.SQL(), table.RetrySets(t.table, retriedNote))
		}
		return "", hint.Errorf(advice, "the dead letter does not hold the whole row: it was too large")
	}
	if !slices.Contains(originals, id) {
		return "", hint.Errorf("correct outboxes[].layout, or discard it",
			"the dead letter has no column %q for the id", id)
	}
	fresh := t.freshValues()
	var columns, values []string
	for _, name := range originals {
		c, ok := t.columns[name]
		if !ok {
			return "", hint.Errorf(
				"add the column to the table again for as long as the retry takes, "+
					"or discard the dead letter",
				"table %s has no column %q any more", t.table, name)
		}
		if c.Generated || name == id && table.Journals(t.table) { // ids of append-only tables come once
			continue
		}
		value, isFresh := fresh[name]
		switch {
		case isFresh:
		case name == t.table.Layout.Columns[outbox.Status]:
			continue // the default is a new row's; the original's is that of a dead one
		default:
			value = c.valueSQL("g.original", t.table)
		}
		columns, values = append(columns, outbox.QuoteIdent(name)), append(values, value)
	}
	if len(columns) == 0 {
		return "", hint.Errorf("discard it", "the dead letter has nothing of the row but its id")
	}
	return strings.NewReplacer(
		"{dead}", t.letters, "{table}", t.table.SQL(), "{id}", t.table.Column(outbox.ID),
		"{idvalue}", t.columns[id].valueSQL("d.original", t.table), "{isdead}", table.DeadSQL(t.table, "t",
			"(SELECT "+t.columns[id].valueSQL("d.original", t.table)+" AS id FROM "+t.letters+
				" d WHERE d.dead_letter_id = ANY ($1::bigint[]))"),
		"{goneid}", t.columns[id].valueSQL("g.original", t.table),
		"{columns}", strings.Join(columns, ", "), "{values}", strings.Join(values, ", ")).Replace(`
WITH gone AS (
	DELETE FROM {dead} d WHERE d.dead_letter_id = ANY($1::bigint[])
		AND NOT EXISTS (SELECT FROM {table} t WHERE t.{id} = {idvalue} AND NOT {isdead})
	RETURNING d.dead_letter_id, d.original
), free AS MATERIALIZED (
	SELECT t.{id} AS id FROM gone g JOIN {table} t ON t.{id} = {goneid} AND {isdead}
), put AS (
	INSERT INTO {table} AS t ({columns}) OVERRIDING SYSTEM VALUE
	SELECT {values} FROM gone g WHERE NOT EXISTS (SELECT FROM {table} t WHERE t.{id} = {goneid})
	ORDER BY g.dead_letter_id RETURNING concat(t.{id}) AS id
), ` + table.WakeSQL(t.table, retriedNote) + `
SELECT ARRAY(SELECT dead_letter_id FROM gone),
	ARRAY(SELECT id FROM put UNION ALL SELECT id FROM woken) WHERE ` + pg.OwnPath), nil
}

// freshValues are the values, by column, that a retried row does not take from its original.
func (t *target) freshValues() map[string]string {
	layout := &t.table.Layout
	record, status := "NULL", ""
	if layout.Records() {
		record, status = pg.QuoteLiteral(retriedNote), layout.States[outbox.Failed]
	}
	fresh := map[string]string{}
	for f, value := range map[outbox.Field]string{
		outbox.Attempts: "0", outbox.LastError: record,
		outbox.ProcessedAt: "NULL", outbox.AvailableAt: "now()",
	} {
		if layout.Has(f) {
			fresh[layout.Columns[f]] = value
		}
	}
	if status != "" {
		fresh[layout.Columns[outbox.Status]] = pg.QuoteLiteral(status)
	}
	return fresh
}
