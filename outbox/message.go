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

// Message is an event as a producer writes it. A field that is left at its zero
// value is left to the column's default; one that is set needs a column in the
// table's layout.
//
// ID, TenantID and AggregateID take an integer or a string of any type, or a
// value with a Value, MarshalText or String method, as types for UUIDs have. The
// column decides which texts it accepts.
type Message struct {
	// Table is "table" or "schema.table"; without a schema it is in "public",
	// whatever the search_path. Default: that of the [Inserter], or [DefaultTable].
	Table string
	// ID is the row's id. Set it where the table does not make one, as where a
	// UUID comes from the application. Default: the table makes it.
	ID any
	// TenantID, AggregateType and AggregateID name the aggregate. Events of one
	// aggregate keep their order; events of two have none. Default in the
	// canonical layout: 0, "" and 0.
	TenantID      any
	AggregateType string
	AggregateID   any
	// AggregateVersion is the aggregate's version after the event. The canonical
	// table has no column for it. Default: the column's default.
	AggregateVersion int64
	// EventType is the event's name, such as "order.placed", and required.
	EventType string
	// EventVersion is the version of the payload's shape. Default: 1 in the
	// canonical table, elsewhere the column's default.
	EventVersion int16
	// Payload is JSON, and required. Where the column is jsonb, consumers get the
	// same value, but not the same bytes.
	Payload json.RawMessage
	// Headers are written as a JSON object of texts into [Inserter.HeadersColumn].
	// Names are visible ASCII without a colon, and do not begin with "Nats-".
	Headers map[string]string
	// OccurredAt is when the event happened, to the microsecond, in UTC. Default:
	// the column's default; in the canonical table the start of the transaction.
	OccurredAt time.Time
	// AvailableAt holds the event back until then. Default: the column's default;
	// in the canonical table at once.
	AvailableAt time.Time
	// TraceID is a W3C traceparent, or any other id to find the event by.
	// Default: what [Inserter.TraceID] returns, or NULL.
	TraceID string
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
		return errors.New("no Payload")
	case !json.Valid(m.Payload):
		return errors.New("invalid Payload: not JSON")
	case !utf8.Valid(m.Payload):
		return errors.New("invalid Payload: not UTF-8")
	}
	return validateHeaders(m.Headers)
}

// validateHeaders goes by name, so that the same message has the same error.
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

// values are the texts of the columns that the message sets, the headers' last; nil leaves a column to its
// default. A driver sends a text as it is, and the server reads it as the column's type, whatever that is.
func (m *Message) values() (row [numSlots]*string, err error) {
	for f, id := range map[Field]any{ID: m.ID, TenantID: m.TenantID, AggregateID: m.AggregateID} {
		if row[f], err = idText(id); err != nil {
			return row, fmt.Errorf("invalid %s: %w", messageFields[f], err)
		}
	}
	if row[ID] != nil && *row[ID] == "" {
		return row, errors.New("invalid ID: it is empty")
	}
	for f, s := range map[Field]string{
		AggregateType: m.AggregateType, EventType: m.EventType, TraceID: m.TraceID,
		AggregateVersion: number(m.AggregateVersion), EventVersion: number(int64(m.EventVersion)),
		OccurredAt: instant(m.OccurredAt), AvailableAt: instant(m.AvailableAt), Payload: string(m.Payload),
	} {
		if s != "" {
			row[f] = &s
		}
	}
	if len(m.Headers) > 0 {
		encoded, err := json.Marshal(m.Headers)
		if err != nil {
			return row, fmt.Errorf("encode Headers: %w", err)
		}
		text := string(encoded)
		row[slotHeaders] = &text
	}
	for f, s := range row {
		if s != nil && !isText(*s) {
			return row, fmt.Errorf("invalid %s: it has a zero byte or is not UTF-8", messageFields[f])
		}
	}
	return row, nil
}

func number(n int64) string {
	if n == 0 {
		return ""
	}
	return strconv.FormatInt(n, 10)
}

// instant is in UTC: a column without a time zone keeps what is written and drops the zone.
func instant(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Truncate(time.Microsecond).Format(time.RFC3339Nano)
}

// idText is the text of an id, nil where there is none. A number and a string are what they are, also where
// their type has a String method, which may be made for logs.
func idText(id any) (*string, error) {
	if v, ok := id.(driver.Valuer); ok && !isNil(id) {
		value, err := v.Value()
		if err != nil {
			return nil, err
		}
		id = value
	}
	if id == nil {
		return nil, nil
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
		text, err := marshal(id)
		if err != nil {
			return nil, err
		}
		s = text
	}
	return &s, nil
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
