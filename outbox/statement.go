package outbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// maxParameters is how many parameters a statement can have in PostgreSQL's protocol.
const maxParameters = 65535

// statement is one INSERT of some rows.
type statement struct {
	table   Table
	headers string // the column of the headers
	rows    []rowValues
	columns []int // those that a row sets, ascending
	values  int   // those that are set, in all rows
}

func (i *Inserter) statement(ctx context.Context, messages []Message) (*statement, error) {
	s := &statement{headers: i.HeadersColumn}
	var err error
	if s.table, err = i.table(messages); err != nil {
		return nil, err
	}
	for n := range messages {
		row, err := i.row(ctx, messages[n], &s.table.Layout)
		if err == nil {
			err = s.add(row)
		}
		if err != nil && len(messages) > 1 {
			err = fmt.Errorf("number %d: %w", n+1, err)
		}
		if err != nil {
			return nil, err
		}
	}
	if s.values > maxParameters {
		return nil, fmt.Errorf("they have %d values, and a statement takes %d: insert them in parts",
			s.values, maxParameters)
	}
	slices.Sort(s.columns)
	return s, nil
}

// table is the one table that all messages are for.
func (i *Inserter) table(messages []Message) (t Table, err error) {
	of := func(m Message) string { return cmp.Or(m.Table, i.Table, DefaultTable) }
	name := of(messages[0])
	for _, m := range messages[1:] {
		if of(m) != name {
			return t, fmt.Errorf("one statement writes to one table, not to %q and %q", name, of(m))
		}
	}
	t.Layout = i.Layout
	if t.Layout.Columns == [NumFields]string{} {
		t.Layout = Canonical()
	}
	t.Schema, t.Name, err = ParseTable(name)
	return t, err
}

// row is what the message and the inserter set.
func (i *Inserter) row(ctx context.Context, m Message, layout *Layout) (row rowValues, err error) {
	if err := m.validate(); err != nil {
		return row, err
	}
	if i.CheckNames {
		if err := CheckEventType(m.EventType); err != nil {
			return row, err
		}
	}
	if i.Check != nil {
		if err := i.Check(m); err != nil {
			return row, err
		}
	}
	if m.TraceID == "" && i.TraceID != nil {
		m.TraceID = i.TraceID(ctx)
	}
	if row, err = m.values(); err != nil {
		return row, err
	}
	// These two canonical columns take no NULL and have no default.
	if layout.Name == Canonical().Name {
		zero := "0"
		row[AggregateType] = &m.AggregateType
		row[AggregateID] = cmp.Or(row[AggregateID], &zero)
	}
	return row, nil
}

// add refuses a row with a value that has no column.
func (s *statement) add(row rowValues) error {
	for c, value := range row {
		if value == nil {
			continue
		}
		if s.column(c) == "" {
			return s.noColumn(c)
		}
		if !slices.Contains(s.columns, c) {
			s.columns = append(s.columns, c)
		}
		s.values++
	}
	s.rows = append(s.rows, row)
	return nil
}

func (s *statement) column(c int) string {
	if c == headersColumn {
		return s.headers
	}
	return s.table.Layout.Columns[c]
}

func (s *statement) noColumn(c int) error {
	remedy := "name a jsonb column in Inserter.HeadersColumn"
	if c != headersColumn {
		remedy = fmt.Sprintf("map %s to a column, here and in the relay's layout", Field(c))
	}
	return fmt.Errorf("no column for %s in layout %q of %s: %s, or leave %s unset", messageFields[c],
		cmp.Or(s.table.Layout.Name, "custom"), s.table.String(), remedy, messageFields[c])
}

// sql returns all ids as one value, so that one call reads them with every driver. The server inserts the
// rows of VALUES in their order, and returns them in it.
func (s *statement) sql() string {
	var b strings.Builder
	b.WriteString("WITH inserted AS (INSERT INTO " + s.table.SQL() + " (")
	for n, c := range s.columns {
		b.WriteString(comma(n) + QuoteIdent(s.column(c)))
	}
	b.WriteString(")\nVALUES ")
	parameter := 0
	for n, row := range s.rows {
		b.WriteString(comma(n) + "(")
		for n, c := range s.columns {
			value := "DEFAULT"
			if row[c] != nil {
				parameter++
				value = "$" + strconv.Itoa(parameter) + casts[c]
			}
			b.WriteString(comma(n) + value)
		}
		b.WriteString(")")
	}
	id := s.table.Column(ID)
	b.WriteString("\nRETURNING " + id + ")\n" +
		"SELECT pg_catalog.json_agg(" + id + "::pg_catalog.text)::pg_catalog.text FROM inserted")
	return b.String()
}

func comma(n int) string {
	if n == 0 {
		return ""
	}
	return ", "
}

// casts make the server refuse a bytea column, which would read backslashes in JSON as escapes. It converts
// json to jsonb and to text, and not to bytea.
var casts = [numColumns]string{Payload: "::pg_catalog.json", headersColumn: "::pg_catalog.json"}

func (s *statement) args() []any {
	args := make([]any, 0, s.values)
	for _, row := range s.rows {
		for _, c := range s.columns {
			if row[c] != nil {
				args = append(args, *row[c])
			}
		}
	}
	return args
}

func scanIDs(row scanner) (ids []string, err error) {
	var text *string
	if err := row.Scan(&text); err != nil || text == nil {
		return nil, err // NULL where the table took no row
	}
	if err := json.Unmarshal([]byte(*text), &ids); err != nil {
		return nil, fmt.Errorf("read ids: %w", err)
	}
	return ids, nil
}

// explain names the table, and the remedy where the SQLSTATE has one.
func (s *statement) explain(err error) error {
	err = fmt.Errorf("write to %s: %w", &s.table, err)
	var server interface{ SQLState() string } // of pgx and of lib/pq
	if !errors.As(err, &server) {
		return err
	}
	if remedy := s.remedy(server.SQLState()); remedy != "" {
		return fmt.Errorf("%w: %s", err, remedy)
	}
	return err
}

func (s *statement) remedy(state string) string {
	switch state {
	case "42P01", "3F000": // undefined_table, invalid_schema_name
		return "create the table with `walpost migrate up`, or name another one"
	case "42703": // undefined_column
		return "correct the columns of the layout, here and in the relay's configuration"
	case "42501": // insufficient_privilege
		return fmt.Sprintf("GRANT INSERT, SELECT (%s) ON %s to the role", s.table.Column(ID), s.table.SQL())
	case "428C9": // generated_always
		return "leave ID unset, as the table makes it"
	case "23502": // not_null_violation
		return "set the field of that column, or give the column a default"
	case "25P02": // in_failed_sql_transaction
		return "an earlier statement of the transaction failed: roll it back"
	}
	return ""
}
