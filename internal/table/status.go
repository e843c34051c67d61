package table

import (
	"context"
	"fmt"
	"strings"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// readStates asks the server how the status column renders the layout's states, such as "t" for true: rows
// of the WAL have them so.
func (f *tableFacts) readStates(ctx context.Context, conn *pgx.Conn, t *outbox.Table) error {
	f.states = t.Layout.States
	column := t.Layout.Columns[outbox.Status]
	if f.types[column] == "" {
		return nil // it is not mapped, or missing
	}
	var foreign, isDomain bool
	err := conn.QueryRow(ctx, `SELECT (`+pg.ForeignTypeSQL("a.atttypid")+`) AND y.typtype <> 'e',
			y.typtype = 'd', a.attnotnull AND NOT a.atthasdef
		FROM pg_attribute a JOIN pg_type y ON y.oid = a.atttypid
		WHERE a.attrelid = to_regclass($1) AND a.attname = $2 AND NOT a.attisdropped`,
		t.SQL(), column).Scan(&foreign, &isDomain, &f.required)
	if err != nil {
		return fmt.Errorf("read column %s of %s: %w", column, t, err)
	}
	if foreign {
		f.stateErr = fmt.Errorf("its type %s is not PostgreSQL's own", f.types[column])
		return nil
	}
	typ := f.types[column] // with its length, or its digits
	if isDomain {          // whose checks may call anything
		if typ, _, err = readColumnType(ctx, conn, t, outbox.Status); err != nil {
			return err
		}
	}
	for s, state := range t.Layout.States {
		if state == "" {
			continue
		}
		err := conn.QueryRow(ctx, fmt.Sprintf("SELECT concat(%s::%s)", outbox.QuoteLiteral(state), typ)).
			Scan(&f.states[s])
		if pg.Code(err) == pgerrcode.InsufficientPrivilege { // on the schema of its type
			f.states[s] = state
			continue
		}
		// The state may be as it was rendered before.
		isCut := strings.HasPrefix(typ, "character") &&
			strings.TrimRight(f.states[s], " ") != strings.TrimRight(state, " ")
		if pg.InClass(err, pg.DataException) || err == nil && isCut {
			f.stateErr = fmt.Errorf("it has type %s, which cannot hold %q", f.types[column], state)
			return nil
		}
		if err != nil {
			return fmt.Errorf("render %q as the type of %s of %s: %w", state, column, t, err)
		}
	}
	return nil
}

func (f *tableFacts) statusProblems(t *outbox.Table, p *check.Findings) {
	column := called(t.Layout.Columns[outbox.Status], outbox.Status)
	p.If(f.stateErr != nil, "table-status",
		hint.Errorf("write the states in outboxes[].mark as the column has them, as in {set: {status: 2}} "+
			"or {set: {state: sent}}",
			"column %s of %s cannot tell the states: %w", column, t, f.stateErr))
	byDefault := MarkOf(t).Stays() && t.Layout.States[outbox.Failed] == ""
	p.If(f.stateErr == nil && byDefault && f.required && t.Layout.Has(outbox.Status), "table-status",
		hint.Errorf(fmt.Sprintf("ALTER TABLE %s ALTER COLUMN %s SET DEFAULT <the state of a new row>",
			t.SQL(), t.Column(outbox.Status)),
			"column %s of %s has no default: a row that JetStream has lost could not become pending again",
			column, t))
}
