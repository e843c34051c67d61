package table

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// A row that was delivered with another mark looks pending where the present mark does not know of it. The
// table and the journal show it, except where the old mark was a status and no column has the time.

// readMarks asks whether rows were delivered before the journal had any entry.
func (f *appendOnlyFacts) readMarks(
	ctx context.Context, conn *pgx.Conn, t *outbox.Table, own *ownTables,
) (err error) {
	var journaled, there bool
	err = conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+own.journal.Entries+` WHERE outbox = $1),
		EXISTS (SELECT FROM pg_attribute WHERE attrelid = to_regclass($2) AND attname = $3
			AND NOT attisdropped)`,
		t.String(), t.SQL(), t.Layout.Unjournaled).Scan(&journaled, &there)
	if err == nil && there && !journaled {
		err = conn.QueryRow(ctx, fmt.Sprintf(`SELECT EXISTS (SELECT FROM %s WHERE %s IS NOT NULL)`,
			t.SQL(), outbox.QuoteIdent(t.Layout.Unjournaled))).Scan(&f.marked)
	}
	return err
}

// readJournaled asks whether a table had its marks in the journal, and still refuses UPDATE as it had to
// then. A role that may not read the journal had no marks there.
func (f *tableFacts) readJournaled(
	ctx context.Context, conn *pgx.Conn, t *outbox.Table, own *ownTables,
) error {
	var readable bool
	err := conn.QueryRow(ctx, `SELECT coalesce(has_table_privilege(to_regclass($1), 'SELECT'), false)`,
		own.journal.Entries).Scan(&readable)
	if err == nil && readable {
		err = conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM `+own.journal.Entries+` WHERE outbox = $1)`,
			t.String()).Scan(&f.journaled)
	}
	if err != nil {
		return fmt.Errorf("read the journal of %s: %w", t, err)
	}
	err = conn.QueryRow(ctx, `SELECT coalesce(array_agg(drop), '{}') FROM (
			SELECT format('DROP TRIGGER %I ON %s', g.tgname, g.tgrelid::regclass) AS drop
			FROM pg_trigger g
			WHERE g.tgfoid = to_regproc($2) AND g.tgenabled IN ('O', 'A') AND g.tgparentid = 0
				AND g.tgtype & $3 <> 0 AND g.tgrelid IN (
					SELECT to_regclass($1) UNION SELECT relid FROM pg_partition_tree(to_regclass($1)))
			ORDER BY 1) g`,
		t.SQL(), own.appendOnly, triggerUpdate).Scan(&f.refusing)
	if err != nil {
		return fmt.Errorf("read triggers of %s: %w", t, err)
	}
	return nil
}

// journaledProblems are of a table whose marks stood in the journal, and now do not.
func (f *tableFacts) journaledProblems(t *outbox.Table, own *ownTables, p *check.Findings) {
	p.If(f.journaled, "table-other-marks", hint.Errorf(
		"keep outboxes[].mark: journal; or let nothing be pending, stop the relay, "+
			"and as the tables' owner: "+forgetSQL(t, own),
		"rows of %s were delivered with mark \"journal\", and mark %q does not know of them: "+
			"they would be delivered again", t, t.Mark))
	if columns := Writes(t); len(columns) > 0 {
		p.If(len(f.refusing) > 0, "table-refuses-update", hint.Errorf(
			"keep outboxes[].mark: journal, or as its owner: "+strings.Join(f.refusing, "; "),
			"a trigger on %s refuses every UPDATE, and mark %q needs %s",
			t, t.Mark, updatePrivilege(UpdateColumns(t))))
	}
}

// forgetSQL deletes the delivered rows of a table whose marks stand in the journal, and all that the journal
// has of the table.
func forgetSQL(t *outbox.Table, own *ownTables) string {
	by := *t
	by.Journal = own.journal
	return journalSQL(&by, `BEGIN; DELETE FROM {table} e USING {entries} j, unnest(j.ids) r `+
		`WHERE j.outbox = {outbox} AND {within}; `+
		`DELETE FROM {entries} WHERE outbox = {outbox}; DELETE FROM {deferred} WHERE outbox = {outbox}; `+
		`UPDATE {known} SET unsettled = DEFAULT WHERE outbox = {outbox}; COMMIT`)
}

// otherMarks reports rows that have a time of delivery, and whose status says that they are pending, where no
// row has the status of a delivered one: the mark has been another one until now. Some rows of this kind
// beside delivered ones are not enough: an operator has made them pending again. It looks at the first rows
// only, because no index need answer: a long backlog must not keep a start waiting.
func (db *DB) otherMarks(ctx context.Context, t *outbox.Table) (p check.Findings, err error) {
	l := &t.Layout
	if !Keeps(t) || !l.Has(outbox.Status) || !l.Has(outbox.ProcessedAt) {
		return nil, nil
	}
	done := fmt.Sprintf("%s = %s", t.Column(outbox.Status), outbox.QuoteLiteral(l.States[outbox.Done]))
	marked := fmt.Sprintf("%s IS NOT NULL AND %s", t.Column(outbox.ProcessedAt), isPending(t))
	var others bool
	err = db.QueryRow(ctx, []any{&others}, fmt.Sprintf(
		`WITH first AS MATERIALIZED (SELECT %s, %s FROM %s ORDER BY %s LIMIT 1000)
		SELECT NOT EXISTS (SELECT FROM first WHERE %s) AND EXISTS (SELECT FROM first WHERE %s)`,
		t.Column(outbox.Status), t.Column(outbox.ProcessedAt), t.SQL(), t.Column(outbox.ID), done, marked))
	if err != nil {
		return nil, fmt.Errorf("look for marks of %s: %w", t, err)
	}
	p.If(others, "table-other-marks", hint.Errorf(
		fmt.Sprintf("UPDATE %s SET %s WHERE %s, or keep the mark", t.SQL(), done, marked),
		"rows of %s were delivered with another mark, and have no status %s: they would be delivered again",
		t, outbox.QuoteLiteral(l.States[outbox.Done])))
	return p, nil
}
