package outbox

import (
	"database/sql/driver"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// Message is an event as a producer writes it. A field at its zero value is left to the column's default. A
// field that is set needs a column in the table's layout.
//
// ID, TenantID and AggregateID take an integer or a string of any type, or a value with a Value, MarshalText
// or String method, as types for UUIDs have. An empty text and a nil pointer are errors. The server decides
// which texts the column's type accepts.
//
// No text may have a zero byte, and all of it is UTF-8. The relay does not send an event whose message is
// longer than max_payload of the NATS server (default: 1 MiB): the row becomes a dead letter.
type Message struct {
	// Table is "table" or "schema.table"; without a schema it is in "public",
	// whatever the search_path. Default: that of the [Inserter], or [DefaultTable].
	Table string
	// ID is the row's id. Set it where the application makes the ids, such as
	// UUIDs. Default: the table makes it.
	ID any
	// TenantID, AggregateType and AggregateID name the aggregate. Events of one
	// aggregate keep their order; events of two have none. Default in the
	// canonical layout: 0, "" and 0.
	TenantID      any
	AggregateType string
	AggregateID   any
	// AggregateVersion is the aggregate's version after the event, from 1. The canonical
	// table has no column for it. Default: the column's default.
	AggregateVersion int64
	// EventType is the event's name, such as "order.placed", and required.
	EventType string
	// EventVersion is the version of the payload's shape, from 1. Default: 1 in the
	// canonical table, elsewhere the column's default.
	EventVersion int16
	// Payload is JSON, and required. In a jsonb column consumers get the
	// same value, but not the same bytes.
	Payload json.RawMessage
	// Headers are written as a JSON object of texts into [Inserter.HeadersColumn].
	// Names are visible ASCII without a colon, and do not begin with "Nats-".
	Headers map[string]string
	// OccurredAt is when the event happened. It is written in UTC, cut to
	// microseconds. Default: the column's default; in the canonical table the start of
	// the transaction.
	OccurredAt time.Time
	// AvailableAt holds the event back until then. Default: the column's default;
	// in the canonical table at once.
	AvailableAt time.Time
	// TraceID is a W3C traceparent, or any other id to find the event by.
	// Default: what [Inserter.TraceID] returns, or NULL.
	TraceID string
}

// rowValues are the texts of a row's columns: by field, and the headers last. nil leaves a column to its
// default. The server reads each text as the column's type, so no driver has to know that type.
type rowValues [numColumns]*string

// Layouts do not map the column of the headers, so it has a place behind the fields.
const (
	headersColumn = int(NumFields)
	numColumns    = headersColumn + 1
)

// messageFields names the columns as a [Message] does. Producers never write the other columns.
var messageFields = [numColumns]string{
	ID: "ID", TenantID: "TenantID", AggregateType: "AggregateType", AggregateID: "AggregateID",
	AggregateVersion: "AggregateVersion", EventType: "EventType", EventVersion: "EventVersion",
	Payload: "Payload", OccurredAt: "OccurredAt", TraceID: "TraceID", AvailableAt: "AvailableAt",
	headersColumn: "Headers",
}

func (m *Message) validate() error {
	switch {
	case m.EventType == "":
		return errors.New("no EventType")
	case m.EventVersion < 0:
		return fmt.Errorf("negative EventVersion %d", m.EventVersion)
	case m.AggregateVersion < 0:
		return fmt.Errorf("negative AggregateVersion %d", m.AggregateVersion)
	case len(m.Payload) == 0:
		return errors.New("no Payload: for an event without one write null")
	case !json.Valid(m.Payload):
		return errors.New("invalid Payload: not JSON")
	case !utf8.Valid(m.Payload):
		return errors.New("invalid Payload: not UTF-8")
	}
	return validateHeaders(m.Headers)
}

// validateHeaders checks the names in their order: a message has the same error each time.
func validateHeaders(headers map[string]string) error {
	for _, name := range slices.Sorted(maps.Keys(headers)) {
		switch {
		case name == "" || strings.ContainsFunc(name, notInHeaderName):
			return fmt.Errorf("invalid header name %q: want visible ASCII without a colon", name)
		case len(name) >= 5 && strings.EqualFold(name[:5], "nats-"):
			return fmt.Errorf("invalid header name %q: names with \"Nats-\" are JetStream's own", name)
		case !isText(headers[name]):
			return fmt.Errorf("invalid header %q: its value has a zero byte or is not UTF-8", name)
		}
	}
	return nil
}

func notInHeaderName(r rune) bool { return r <= ' ' || r > '~' || r == ':' }

// isText reports whether PostgreSQL takes s as a text.
func isText(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

func (m *Message) values() (row rowValues, err error) {
	if row, err = m.ids(); err != nil {
		return row, err
	}
	for column, s := range map[int]string{
		int(AggregateType):    m.AggregateType,
		int(AggregateVersion): version(m.AggregateVersion),
		int(EventType):        m.EventType,
		int(EventVersion):     version(int64(m.EventVersion)),
		int(Payload):          string(m.Payload),
		int(OccurredAt):       instant(m.OccurredAt),
		int(AvailableAt):      instant(m.AvailableAt),
		int(TraceID):          m.TraceID,
		headersColumn:         encodeHeaders(m.Headers),
	} {
		if s != "" {
			row[column] = &s
		}
	}
	for column, s := range row {
		if s != nil && !isText(*s) {
			return row, fmt.Errorf("invalid %s: it has a zero byte or is not UTF-8", messageFields[column])
		}
	}
	return row, nil
}

func (m *Message) ids() (row rowValues, err error) {
	given := [...]any{ID: m.ID, TenantID: m.TenantID, AggregateID: m.AggregateID}
	for f, id := range given {
		if row[f], err = idText(id); err != nil {
			return row, fmt.Errorf("invalid %s: %w", messageFields[f], err)
		}
	}
	return row, nil
}

func version(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// instant is in UTC: a column without a time zone drops the zone of what is written.
func instant(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)
}

func encodeHeaders(headers map[string]string) string {
	if len(headers) == 0 {
		return ""
	}
	text, _ := json.Marshal(headers) // texts always encode
	return string(text)
}

// idText is the text of an id; nil where there is none. Numbers and strings are written as they are, even if
// their type has a String method: it may be made for logs.
func idText(id any) (*string, error) {
	id, err := driverValue(id)
	if id == nil || err != nil {
		return nil, err
	}
	var s string
	switch v := reflect.ValueOf(id); {
	case isNil(id):
		return nil, fmt.Errorf("a nil %T", id)
	case v.CanInt():
		s = strconv.FormatInt(v.Int(), 10)
	case v.CanUint():
		s = strconv.FormatUint(v.Uint(), 10)
	case v.Kind() == reflect.String:
		s = v.String()
	default:
		if s, err = marshal(id); err != nil {
			return nil, err
		}
	}
	if s == "" {
		return nil, errors.New("it is empty")
	}
	return &s, nil
}

// driverValue is what a type of database/sql, such as [database/sql.NullInt64], stands for.
func driverValue(id any) (any, error) {
	if v, ok := id.(driver.Valuer); ok && !isNil(id) {
		return v.Value()
	}
	return id, nil
}

func marshal(id any) (string, error) {
	switch v := id.(type) {
	case encoding.TextMarshaler:
		text, err := v.MarshalText()
		return string(text), err
	case fmt.Stringer:
		return v.String(), nil
	}
	return "", fmt.Errorf("%T is neither an integer nor a text", id)
}

func isNil(v any) bool {
	r := reflect.ValueOf(v)
	return r.Kind() == reflect.Pointer && r.IsNil()
}
