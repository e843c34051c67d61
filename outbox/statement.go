package outbox

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// A row has a slot for each field, and one for the headers, which are no field: the relay's layouts do not
// map them.
const (
	slotHeaders = int(NumFields)
	numSlots    = slotHeaders + 1
)

// mostValues is the number of parameters that the protocol can count.
const mostValues = 65535

// messageFields names the slots as a producer knows them; the relay's own columns are never written.
var messageFields = [numSlots]string{
	ID: "ID", TenantID: "TenantID", AggregateType: "AggregateType", AggregateID: "AggregateID",
	AggregateVersion: "AggregateVersion", EventType: "EventType", EventVersion: "EventVersion",
	Payload: "Payload", OccurredAt: "OccurredAt", TraceID: "TraceID", AvailableAt: "AvailableAt",
	slotHeaders: "Headers",
}

// statement is one INSERT of some rows.
type statement struct {
	table   Table
	headers string
	rows    [][numSlots]*string
	slots   []int // those that a row sets, in the order of the columns
}

func (i *Inserter) statement(ctx context.Context, messages []Message) (*statement, error) {
	s := &statement{headers: i.HeadersColumn}
	var err error
	if s.table, err = i.table(messages); err != nil {
		return nil, err
	}
	for n := range messages {
		row, err := i.row(ctx, &s.table.Layout, messages[n])
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
	slices.Sort(s.slots)
	if most := mostValues / len(s.slots); len(s.rows) > most {
		return nil, fmt.Errorf("one statement takes at most %d of these: insert them in parts", most)
	}
	return s, nil
}

// table is the one table that all messages are for.
func (i *Inserter) table(messages []Message) (t Table, err error) {
	name := or(or(i.Table, messages[0].Table), DefaultTable)
	for n := range messages {
		if other := or(or(messages[n].Table, i.Table), DefaultTable); other != name {
			return t, fmt.Errorf("one statement writes to one table, not to %q and %q", name, other)
		}
	}
	t.Layout = i.Layout
	if t.Layout.Columns == [NumFields]string{} {
		t.Layout = Canonical()
	}
	t.Schema, t.Name, err = ParseTable(name)
	return t, err
}

func or(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

// row is what the message and the inserter set.
func (i *Inserter) row(ctx context.Context, layout *Layout, m Message) (row [numSlots]*string, err error) {
	if err := m.validate(); err != nil {
		return row, err
	}
	if i.CheckNames {
		if err := CheckEventType(m.EventType); err != nil {
			return row, err
		}
	}
	if m.TraceID == "" && i.TraceID != nil {
		m.TraceID = i.TraceID(ctx)
	}
	if row, err = m.values(); err != nil {
		return row, err
	}
	// The canonical columns take no NULL and have no default.
	if layout.Name == Canonical().Name {
		zero := "0"
		row[AggregateType] = &m.AggregateType
		if row[AggregateID] == nil {
			row[AggregateID] = &zero
		}
	}
	return row, nil
}

// add refuses a row with a value that has no column.
func (s *statement) add(row [numSlots]*string) error {
	for slot, value := range row {
		if value == nil || slices.Contains(s.slots, slot) {
			continue
		}
		if s.column(slot) == "" {
			return s.noColumn(slot)
		}
		s.slots = append(s.slots, slot)
	}
	s.rows = append(s.rows, row)
	return nil
}

func (s *statement) column(slot int) string {
	if slot == slotHeaders {
		return s.headers
	}
	return s.table.Layout.Columns[slot]
}

func (s *statement) noColumn(slot int) error {
	remedy := "name a jsonb column in Inserter.HeadersColumn"
	if slot != slotHeaders {
		remedy = fmt.Sprintf("map %s to a column, here and in the relay's layout", Field(slot))
	}
	return fmt.Errorf("no column for %s in layout %q of %s: %s, or leave %s unset",
		messageFields[slot], or(s.table.Layout.Name, "custom"), s.table.String(), remedy, messageFields[slot])
}

// sql has all ids come back as one value, so that a driver's way to read rows does not matter. The rows of
// VALUES are inserted, and returned, in their order.
func (s *statement) sql() string {
	var b strings.Builder
	b.WriteString("WITH inserted AS (INSERT INTO " + s.table.SQL() + " (")
	for n, slot := range s.slots {
		b.WriteString(separator(n) + QuoteIdent(s.column(slot)))
	}
	b.WriteString(")\nVALUES ")
	parameter := 0
	for n, row := range s.rows {
		b.WriteString(separator(n) + "(")
		for n, slot := range s.slots {
			value := "DEFAULT"
			if row[slot] != nil {
				parameter++
				value = "$" + strconv.Itoa(parameter) + casts[slot]
			}
			b.WriteString(separator(n) + value)
		}
		b.WriteString(")")
	}
	b.WriteString("\nRETURNING " + s.table.Column(ID) + ")\n" +
		"SELECT pg_catalog.json_agg(" + s.table.Column(ID) + "::pg_catalog.text)::pg_catalog.text " +
		"FROM inserted")
	return b.String()
}

func separator(n int) string {
	if n == 0 {
		return ""
	}
	return ", "
}

// casts are for values that another type would take as something else: a bytea reads the backslashes of JSON
// as its own escapes. There is no cast from json to bytea, and there are some to jsonb and text.
var casts = [numSlots]string{Payload: "::pg_catalog.json", slotHeaders: "::pg_catalog.json"}

func (s *statement) args() (args []any) {
	for _, row := range s.rows {
		for _, slot := range s.slots {
			if row[slot] != nil {
				args = append(args, *row[slot])
			}
		}
	}
	return args
}

func scanIDs(row scanner) (ids []string, err error) {
	var text *string
	if err := row.Scan(&text); err != nil || text == nil {
		return nil, err // no row at all is NULL
	}
	if err := json.Unmarshal([]byte(*text), &ids); err != nil {
		return nil, fmt.Errorf("read ids: %w", err)
	}
	return ids, nil
}
