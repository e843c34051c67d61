package outbox

import (
	"fmt"
	"slices"
	"strings"
)

// Field is the role that a column plays for the relay.
type Field uint8

// The fields from TenantID to TraceID are what an event is made of: they reach
// consumers and they are what [Event.Hash] covers. The fields after them are
// the relay's own bookkeeping.
const (
	ID Field = iota
	TenantID
	AggregateType
	AggregateID
	AggregateVersion
	EventType
	EventVersion
	Payload
	OccurredAt
	TraceID

	AvailableAt
	ProcessedAt
	Attempts
	LastError

	NumFields
)

const (
	firstHashed = TenantID
	lastHashed  = TraceID
)

var fieldNames = [NumFields]string{
	"id", "tenant_id", "aggregate_type", "aggregate_id", "aggregate_version", "event_type", "event_version",
	"payload", "occurred_at", "trace_id", "available_at", "processed_at", "attempts", "last_error",
}

func (f Field) String() string {
	if f < NumFields {
		return fieldNames[f]
	}
	return fmt.Sprintf("field %d", uint8(f))
}

// ParseField finds a field by its name in configuration files.
func ParseField(name string) (Field, bool) {
	i := slices.Index(fieldNames[:], name)
	return Field(i), i >= 0
}

// Layout maps fields to the columns of an outbox table. An empty name means
// that the table has no such column.
type Layout struct {
	Name    string
	Columns [NumFields]string
}

// Has reports whether the layout maps the field.
func (l *Layout) Has(f Field) bool { return l.Columns[f] != "" }

// Records reports whether a row can record its failure. Without these columns no row is parked: one that
// fails becomes a dead letter at once.
func (l *Layout) Records() bool { return l.Has(Attempts) && l.Has(LastError) && l.Has(AvailableAt) }

// RecordLacks are the fields without which a row cannot hold a failure.
func (l *Layout) RecordLacks() (lacks []string) {
	for _, f := range [...]Field{Attempts, LastError, AvailableAt} {
		if !l.Has(f) {
			lacks = append(lacks, f.String())
		}
	}
	return lacks
}

// Dates reports whether a row tells since when it is due.
func (l *Layout) Dates() bool { return l.Has(AvailableAt) || l.Has(OccurredAt) }

// Canonical is the layout of the table that `walpost migrate` creates.
func Canonical() Layout {
	l := Layout{Name: "canonical", Columns: fieldNames}
	l.Columns[AggregateVersion] = ""
	return l
}

// Debezium is the layout of Debezium's outbox event router.
func Debezium() Layout {
	l := Layout{Name: "debezium"}
	l.Columns[ID] = "id"
	l.Columns[AggregateType] = "aggregatetype"
	l.Columns[AggregateID] = "aggregateid"
	l.Columns[EventType] = "type"
	l.Columns[Payload] = "payload"
	return l
}

// LayoutNamed returns a preset layout.
func LayoutNamed(name string) (Layout, bool) {
	switch name {
	case "canonical":
		return Canonical(), true
	case "debezium":
		return Debezium(), true
	}
	return Layout{}, false
}

// CustomLayout builds a layout from field names and column names.
func CustomLayout(columns map[string]string) (Layout, error) {
	l := Layout{Name: "custom"}
	for name, column := range columns {
		f, ok := ParseField(name)
		if !ok {
			want := strings.Join(fieldNames[:], ", ")
			return Layout{}, fmt.Errorf("unknown field %q, want one of %s", name, want)
		}
		l.Columns[f] = column
	}
	for _, f := range []Field{ID, EventType, Payload} {
		if !l.Has(f) {
			return Layout{}, fmt.Errorf("field %q is not mapped to a column", f)
		}
	}
	return l, nil
}

// Mark is how a stored row is taken out of the pending ones.
type Mark string

const (
	// MarkUpdate sets processed_at.
	MarkUpdate Mark = "update"
	// MarkDelete deletes the row.
	MarkDelete Mark = "delete"
	// MarkNone leaves the row alone: the producer inserts and deletes it in one
	// transaction, and only the WAL ever shows it.
	MarkNone Mark = "none"
)

// Valid reports whether m is one of the marks.
func (m Mark) Valid() bool { return m == MarkUpdate || m == MarkDelete || m == MarkNone }

// Table is an outbox table as the relay reads it.
type Table struct {
	Schema string
	Name   string
	Layout Layout
	Mark   Mark
	// IDType is the SQL type of the id column, as the catalog names it. It is set before a session
	// begins, and a session ends when it is another one.
	IDType string
	// Partitioned: an UPDATE may move a row from one partition to another, which is an
	// INSERT in the WAL.
	Partitioned bool
	// PayloadJSON: the payload's column is json or jsonb.
	PayloadJSON bool
	// Text are the columns of the types text and varchar: the length of a value shows without reading
	// it, and a cast to text calls no user's function.
	Text [NumFields]bool
	// Shard is the part of the rows that is looked at; zero is all.
	Shard Shard
}

// ParseTable splits "schema.table"; without a schema it is "public".
func ParseTable(s string) (schema, name string, err error) {
	schema, name, ok := strings.Cut(s, ".")
	if !ok {
		schema, name = "public", s
	}
	if schema == "" || name == "" || strings.Contains(name, ".") {
		return "", "", fmt.Errorf("table name %q: want table or schema.table", s)
	}
	return schema, name, nil
}

// String is the table's name with its schema, "public.outbox_messages".
func (t *Table) String() string { return t.Schema + "." + t.Name }

// SQL is the quoted name.
func (t *Table) SQL() string { return QuoteIdent(t.Schema) + "." + QuoteIdent(t.Name) }

// Column is the quoted name of a field's column.
func (t *Table) Column(f Field) string { return QuoteIdent(t.Layout.Columns[f]) }

// QuoteIdent quotes an SQL identifier.
func QuoteIdent(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }
