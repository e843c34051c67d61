package outbox

import (
	"fmt"
	"slices"
	"strings"
)

// Field is the role that a column plays for the relay.
type Field uint8

// The fields from TenantID to LastHeader are what an event is made of: they reach
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
	// FirstHeader to LastHeader are columns that become headers of their own: [Layout.Headers].
	FirstHeader

	AvailableAt Field = iota + MaxHeaders - 1
	ProcessedAt
	Attempts
	LastError
	Status // tells the row's state: [Layout.States]

	NumFields
)

// MaxHeaders is how many columns of a table can become headers.
const MaxHeaders = 8

// LastHeader is the last field that an event is made of.
const LastHeader = FirstHeader + MaxHeaders - 1

const (
	firstHashed = TenantID
	lastHashed  = LastHeader
)

var fieldNames = [NumFields]string{
	ID: "id", TenantID: "tenant_id", AggregateType: "aggregate_type", AggregateID: "aggregate_id",
	AggregateVersion: "aggregate_version", EventType: "event_type", EventVersion: "event_version",
	Payload: "payload", OccurredAt: "occurred_at", TraceID: "trace_id",
	AvailableAt: "available_at", ProcessedAt: "processed_at", Attempts: "attempts", LastError: "last_error",
	Status: "status",
}

func (f Field) String() string {
	switch {
	case f >= FirstHeader && f <= LastHeader:
		return fmt.Sprintf("header %d", f-FirstHeader+1)
	case f < NumFields:
		return fieldNames[f]
	}
	return fmt.Sprintf("field %d", uint8(f))
}

// FieldNames are the fields that a map of columns can have, in their order.
func FieldNames() (names []string) {
	for f := ID; f < Status; f++ {
		if f < FirstHeader || f > LastHeader {
			names = append(names, f.String())
		}
	}
	return names
}

// ParseField finds a field by its name in configuration files.
func ParseField(name string) (Field, bool) {
	if !slices.Contains(FieldNames(), name) {
		return 0, false
	}
	return Field(slices.Index(fieldNames[:], name)), true
}

// Layout maps fields to the columns of an outbox table. An empty name means
// that the table has no such column.
type Layout struct {
	Name    string
	Columns [NumFields]string
	// States are the values of the status column, as text; "" where it has none for a state. A row in
	// another state, or with NULL, is pending.
	States [NumStates]string
	// Headers are the names of the headers that the columns from FirstHeader on become. A column of type
	// json or jsonb becomes a header for each key, and its name is the prefix of their names.
	Headers [MaxHeaders]string
	// Unjournaled is the column for processed_at that the table has and [MarkJournal] leaves alone, or "".
	Unjournaled string
}

// State is what a status column says of a row.
type State uint8

const (
	Done   State = iota // delivered
	Failed              // parked or held
	Dead                // has failed too often

	NumStates
)

// Has reports whether the layout maps the field.
func (l *Layout) Has(f Field) bool { return l.Columns[f] != "" }

// Records reports whether a row can record its failure: it counts attempts, and says why it failed, or at
// least that it did, and when it is tried again. Without that no row is parked: one that fails becomes a dead
// letter at once.
func (l *Layout) Records() bool { return l.Has(Attempts) && (l.Has(LastError) || l.failsByStatus()) }

func (l *Layout) failsByStatus() bool { return l.States[Failed] != "" && l.Has(AvailableAt) }

// RecordFields are the fields that a recorded failure is written to.
func (l *Layout) RecordFields() (fields []Field) {
	if !l.Records() {
		return nil
	}
	for _, f := range []Field{Attempts, LastError, AvailableAt} {
		if l.Has(f) {
			fields = append(fields, f)
		}
	}
	if l.States[Failed] != "" || l.States[Dead] != "" {
		fields = append(fields, Status)
	}
	return fields
}

// MarkFields are the fields that say that a row was delivered.
func (l *Layout) MarkFields() (fields []Field) {
	for _, f := range []Field{Status, ProcessedAt} {
		if l.Has(f) {
			fields = append(fields, f)
		}
	}
	return fields
}

// Dates reports whether a row tells since when it is due.
func (l *Layout) Dates() bool { return l.Has(AvailableAt) || l.Has(OccurredAt) }

// Canonical is the layout of the table that `walpost migrate` creates.
func Canonical() Layout {
	l := Layout{Name: "canonical", Columns: fieldNames}
	l.Columns[AggregateVersion], l.Columns[Status] = "", ""
	return l
}

// Append is the layout of the append-only table that `walpost migrate` creates where the configuration has
// it. Its mark is [MarkJournal].
func Append() Layout {
	l := Canonical()
	l.Name = "append"
	l.Columns[AggregateVersion] = "aggregate_version"
	for _, f := range []Field{ProcessedAt, Attempts, LastError} {
		l.Columns[f] = ""
	}
	l.SetHeaders([]Header{{Column: "headers"}})
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

// Eventferry is the layout of the table of eventferry's PostgreSQL adapter. It has no column for the reason
// of a failure. Its message id, partition key and headers become headers that begin with "Outbox-".
func Eventferry() Layout {
	l := Layout{Name: "eventferry", States: [NumStates]string{Done: "2", Failed: "3", Dead: "4"}}
	for f, column := range map[Field]string{
		ID: "id", AggregateType: "aggregate_type", AggregateID: "aggregate_id", EventType: "topic",
		Payload: "payload", OccurredAt: "created_at", TraceID: "trace_id", AvailableAt: "next_retry_at",
		ProcessedAt: "processed_at", Attempts: "attempts", Status: "status",
	} {
		l.Columns[f] = column
	}
	l.SetHeaders([]Header{{Column: "message_id"}, {Column: "partition_key"}, {Column: "headers"}})
	return l
}

// Prisma is the layout of the model OutboxEvent that users of Prisma write. It has no column for the time of
// the next try, which stands before the reason.
func Prisma() Layout {
	l := Layout{Name: "prisma"}
	for f, column := range map[Field]string{
		ID: "id", AggregateType: "aggregateType", AggregateID: "aggregateId", EventType: "eventType",
		Payload: "payload", OccurredAt: "createdAt", ProcessedAt: "publishedAt", Attempts: "attempts",
		LastError: "lastError",
	} {
		l.Columns[f] = column
	}
	return l
}

// presets are the layouts with a name.
var presets = []func() Layout{Canonical, Append, Debezium, Eventferry, Prisma}

// LayoutNames are the names that [LayoutNamed] knows.
func LayoutNames() (names []string) {
	for _, preset := range presets {
		names = append(names, preset().Name)
	}
	return names
}

// PresetColumns are the columns that the preset layouts have for a field.
func PresetColumns(f Field) (columns []string) {
	for _, preset := range presets {
		l := preset()
		if l.Has(f) && !slices.Contains(columns, l.Columns[f]) {
			columns = append(columns, l.Columns[f])
		}
	}
	return columns
}

// LayoutNamed returns a preset layout.
func LayoutNamed(name string) (Layout, bool) {
	for _, preset := range presets {
		if l := preset(); l.Name == name {
			return l, true
		}
	}
	return Layout{}, false
}

// SetStatus maps the status. States that are not given stay as they are, where the column stays the same.
func (l *Layout) SetStatus(column string, states [NumStates]string) {
	if l.Columns[Status] != column {
		l.Columns[Status], l.States = column, [NumStates]string{}
	}
	for s, value := range states {
		if value != "" {
			l.States[s] = value
		}
	}
}

// Header is a column that becomes a header.
type Header struct {
	Column string
	// Name is the header's, or the prefix of the headers' names where the column is a JSON object.
	// Default: HeaderPrefix and the column's name, or HeaderPrefix.
	Name string
}

// HeaderPrefix begins the headers that have no name of their own.
const HeaderPrefix = "Outbox-"

// SetHeaders replaces the columns that become headers. It takes at most MaxHeaders.
func (l *Layout) SetHeaders(headers []Header) {
	for i := range MaxHeaders {
		l.Columns[FirstHeader+Field(i)], l.Headers[i] = "", ""
		if i < len(headers) {
			l.Columns[FirstHeader+Field(i)], l.Headers[i] = headers[i].Column, headers[i].Name
		}
	}
}

// CustomLayout builds a layout from field names and column names.
func CustomLayout(columns map[string]string) (Layout, error) {
	l := Layout{Name: "custom"}
	for name, column := range columns {
		f, ok := ParseField(name)
		if !ok {
			want := strings.Join(FieldNames(), ", ")
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
	// MarkUpdate sets processed_at and, where the layout has one, the status.
	MarkUpdate Mark = "update"
	// MarkDelete deletes the row.
	MarkDelete Mark = "delete"
	// MarkJournal leaves the row alone: what is delivered stands in a journal, many ids in a row. The layout
	// is [Layout.Journaled].
	MarkJournal Mark = "journal"
)

// Valid reports whether m is one of the marks.
func (m Mark) Valid() bool {
	return m == MarkUpdate || m == MarkDelete || m == MarkJournal
}

// Table is an outbox table as the relay reads it.
type Table struct {
	Schema string
	Name   string
	// Given is the name that the configuration gives the outbox, "" where it gives none.
	Given string
	// Known is the name by which the outbox is known: that of the table when it was first delivered, or
	// Given. It is set as IDType is, and "" until then.
	Known string
	// OID is the table's. It is set as IDType is, and 0 until then.
	OID    uint32
	Layout Layout
	Mark   Mark
	// IDType is the SQL type of the id column, as the catalog names it. It is set before a session
	// begins, and a session ends when it is another one.
	IDType string
	// Partitioned: an UPDATE may move a row from one partition to another, which is an
	// INSERT in the WAL.
	Partitioned bool
	// Partitions tells the set of partitions from any other one. It is 0 unless Partitioned.
	Partitions int64
	// PartitionKey is the mapped column that a partitioned table's key begins with; ID, the zero value, if
	// there is none. It has the type KeyType, and nothing changes it in a pending row.
	PartitionKey Field
	KeyType      string
	// Where is a condition on a row, in SQL: rows that do not fit are not events. "" is all rows.
	Where string
	// Filter is Where as the server understands it, with [RowAlias] before each column. It is set as IDType
	// is.
	Filter string
	// JSON are the columns of the types json and jsonb.
	JSON [NumFields]bool
	// Text are the columns of the types text and varchar: the length of a value shows without reading
	// it, and a cast to text calls no user's function.
	Text [NumFields]bool
	// Shard is the part of the rows that is looked at; zero is all.
	Shard Shard
	// Journal is set where Mark is MarkJournal.
	Journal Journal
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

// String is the outbox's name: "public.outbox_messages", where the table was never another one.
func (t *Table) String() string {
	if t.Known != "" {
		return t.Known
	}
	return t.FirstName()
}

// FirstName is the name of an outbox that is not known yet: what the configuration says, or the table's.
func (t *Table) FirstName() string {
	if t.Given != "" {
		return t.Given
	}
	return t.Relation()
}

// Relation is the table's own name with its schema, not quoted.
func (t *Table) Relation() string { return t.Schema + "." + t.Name }

// SQL is the quoted name.
func (t *Table) SQL() string { return QuoteIdent(t.Schema) + "." + QuoteIdent(t.Name) }

// RowAlias stands in [Table.Filter] for the alias of the table.
const RowAlias = "walpost_row"

// FilterSQL is the condition, over an alias of the table, under which a row is this relay's: it fits Where,
// and is in the shard. It is "" where every row is. Without an alias it is one for a publication's row
// filter.
func (t *Table) FilterSQL(alias string) string {
	both := []string{t.WhereSQL(alias), t.ShardSQL(alias)}
	return strings.Join(slices.DeleteFunc(both, func(s string) bool { return s == "" }), " AND ")
}

// WhereSQL is the part of [Table.FilterSQL] that Where asks for.
func (t *Table) WhereSQL(alias string) string {
	switch {
	case t.Where == "":
		return ""
	case alias == "":
		return "(" + t.Where + ")"
	}
	return "(" + strings.ReplaceAll(t.Filter, RowAlias+".", alias+".") + ")"
}

// PendingSQL is the condition, over an alias of the table, under which a row is neither delivered nor dead.
func (t *Table) PendingSQL(alias string) string {
	if alias != "" {
		alias += "."
	}
	l := &t.Layout
	switch {
	case l.Has(Status):
		sql := alias + t.Column(Status) + " IS DISTINCT FROM " + QuoteLiteral(l.States[Done])
		if l.States[Dead] != "" {
			sql += " AND " + alias + t.Column(Status) + " IS DISTINCT FROM " + QuoteLiteral(l.States[Dead])
		}
		return sql
	case l.Has(ProcessedAt):
		return alias + t.Column(ProcessedAt) + " IS NULL"
	}
	return "true"
}

// Column is the quoted name of a field's column. With MarkJournal a row is due when both its table and the
// journal say so, and the column is the journal's.
func (t *Table) Column(f Field) string {
	if t.Mark == MarkJournal && f == AvailableAt {
		return QuoteIdent(journalColumns[f])
	}
	return QuoteIdent(t.Layout.Columns[f])
}

// QuoteLiteral quotes an SQL string.
func QuoteLiteral(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

// QuoteIdent quotes an SQL identifier.
func QuoteIdent(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }
