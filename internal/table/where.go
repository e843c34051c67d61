package table

import (
	"context"
	"fmt"
	"regexp"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// Complete sets what [outbox.Table] says of the journal, and of the condition that narrows an outbox, where
// there is one. It is for statements of a table that was not inspected; [DB.Bind] sets its name.
func (db *DB) Complete(ctx context.Context, t *outbox.Table) error {
	if Journals(t) {
		t.Journal = db.own.journal
	}
	if t.Where == "" || t.Filter != "" {
		return nil
	}
	var f tableFacts
	err := db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error { return f.readFilter(ctx, conn, t) })
	if err == nil {
		err = f.filterErr
	}
	t.Filter = f.filter
	return err
}

// readFilter has the server word the condition that narrows an outbox.
func (f *tableFacts) readFilter(ctx context.Context, conn *pgx.Conn, t *outbox.Table) (err error) {
	if t.Where == "" {
		return nil
	}
	f.filter, err = pg.ReadCondition(ctx, conn, t.SQL(), t.Where)
	switch code := pg.Code(err); {
	case code == pgerrcode.InsufficientPrivilege: // told beside the other privileges that it lacks
		return nil
	case err != nil && (code != "" || hint.Of(err) != "") && !IsTemporary(err):
		f.filterErr = hint.Wrap(fmt.Errorf("condition %q of %s: %w", t.Where, t, err), hint.Of(err))
		return nil
	case err != nil:
		return fmt.Errorf("read the condition of %s: %w", t, err)
	}
	return f.checkFilter(ctx, conn, t)
}

// checkFilter refuses a condition that would change its answer by what a relay writes, or that calls what is
// not PostgreSQL's own.
func (f *tableFacts) checkFilter(ctx context.Context, conn *pgx.Conn, t *outbox.Table) error {
	refuse := func(advice, format string, args ...any) {
		if f.filterErr == nil {
			why := fmt.Sprintf(format, args...)
			f.filterErr = hint.Errorf(advice, "condition %q of %s: %s", t.Where, t, why)
		}
	}
	named := columnsNamed(f.filter)
	rows, _ := conn.Query(ctx, `SELECT attname::text FROM pg_attribute a WHERE attrelid = to_regclass($1)
		AND attname = ANY ($2::text[]::name[]) AND `+pg.ForeignTypeSQL("a.atttypid"), t.SQL(), named)
	foreign, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("read columns of %s: %w", t, err)
	}
	for _, column := range foreign {
		refuse("compare columns whose types are PostgreSQL's own", "column %q has type %s, which is not",
			column, f.types[column])
	}
	byStatus := false
	for _, field := range Writes(t) {
		for _, column := range named {
			switch {
			case column != t.Layout.Columns[field]:
			case field == outbox.Status:
				byStatus = true
			default:
				refuse("compare columns that no relay writes", "the relay itself writes column %q", column)
			}
		}
	}
	if !byStatus || f.filterErr != nil {
		return nil
	}
	return f.checkStates(ctx, conn, t, refuse)
}

// checkStates has the planner simplify the condition for a delivered row, and for a failed one: both have to
// fit where a pending one does.
func (f *tableFacts) checkStates(
	ctx context.Context, conn *pgx.Conn, t *outbox.Table, refuse func(advice, format string, args ...any),
) error {
	const advice = "name the state of dead rows in outboxes[].mark, and in where only states of rows " +
		"that are no events"
	status, first := t.Layout.Columns[outbox.Status], ""
	for s, state := range t.Layout.States {
		if state == "" || outbox.State(s) == outbox.Dead {
			continue
		}
		left, err := pg.ReadConditionWhere(ctx, conn, t.SQL(), t.Where, status, f.types[status], state)
		if err != nil {
			return fmt.Errorf("simplify the condition of %s: %w", t, err)
		}
		switch {
		case left == "false" || strings.HasPrefix(left, "NULL"):
			refuse(advice, "it leaves out rows whose %s is %s, which the relay itself sets", status, state)
		case first != "" && left != first:
			refuse(advice, "delivered and failed rows do not fit alike")
		}
		first = left
	}
	return nil
}

// column is one that a condition in the server's words names.
var column = regexp.MustCompile(regexp.QuoteMeta(outbox.RowAlias) + `\.("(?:[^"]|"")+"|\w+)`)

func columnsNamed(filter string) (names []string) {
	for _, m := range column.FindAllStringSubmatch(filter, -1) {
		name := m[1]
		if strings.HasPrefix(name, `"`) {
			name = strings.ReplaceAll(name[1:len(name)-1], `""`, `"`)
		}
		names = append(names, name)
	}
	return names
}
