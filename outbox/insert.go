package outbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"time"
	"unicode/utf8"
)

// DefaultTable is the outbox that `walpost migrate` creates.
const DefaultTable = "outbox_messages"

// Message is an event as a producer writes it into a table of the canonical
// layout.
type Message struct {
	// Table is "table" or "schema.table"; without a schema it is in "public",
	// whatever the search_path. Default: [DefaultTable].
	Table string
	// TenantID, AggregateType and AggregateID name the aggregate. Events of one
	// aggregate keep their order; events of two have none.
	TenantID      int64
	AggregateType string
	AggregateID   int64
	// EventType is required.
	EventType string
	// EventVersion is the version of the payload's shape. Default: 1.
	EventVersion int16
	// Payload is JSON, and required. The column is jsonb: consumers get the
	// same value, but not the same bytes.
	Payload json.RawMessage
	// OccurredAt is when the event happened. Default: the start of the
	// transaction.
	OccurredAt time.Time
	// AvailableAt holds the event back until then. Default: at once.
	AvailableAt time.Time
	// TraceID is a W3C traceparent, or any other id to find the event by.
	// Default: NULL.
	TraceID string
}

// Insert writes the event through tx and returns the row's id.
//
// tx is the transaction that changes the data which the event tells of: a
// [database/sql.Tx], a pgx.Tx, or anything with their QueryRowContext or
// QueryRow method. If it commits, the event is delivered; if it does not, no
// consumer ever sees the event. A connection or a pool works too, but commits
// the event by itself, without that guarantee.
//
// The relay stores every event in the stream once. A consumer may still be
// handed it again, by its own redelivery, and tells it by its Nats-Msg-Id.
// Events of one aggregate arrive in the order in which their transactions
// committed. That is the order in which things happened only where writers
// exclude each other, as they do when each updates the aggregate's row first.
//
// What is wrong with m is found before anything is sent. An error of the
// server aborts tx, as that of any statement: PostgreSQL refuses some JSON
// that others take, such as the escape \u0000, and a zero byte in any text.
func Insert(ctx context.Context, tx any, m Message) (id int64, err error) {
	query, args, err := m.insert()
	if err != nil {
		return 0, fmt.Errorf("insert event: %w", err)
	}
	row, err := queryRow(ctx, tx, query, args)
	if err != nil {
		return 0, fmt.Errorf("insert event: %w", err)
	}
	if err := row.Scan(&id); err != nil {
		return 0, fmt.Errorf("insert event %q: %w", m.EventType, err)
	}
	return id, nil
}

func (m *Message) insert() (query string, args []any, err error) {
	if err := m.validate(); err != nil {
		return "", nil, err
	}
	table := Table{Schema: "public", Name: DefaultTable}
	if m.Table != "" {
		if table.Schema, table.Name, err = ParseTable(m.Table); err != nil {
			return "", nil, err
		}
	}
	version := m.EventVersion
	if version == 0 {
		version = 1
	}
	// The casts settle the types for drivers that guess them from Go's.
	query = "INSERT INTO " + table.SQL() + ` (tenant_id, aggregate_type, aggregate_id,
	event_type, event_version, payload, occurred_at, available_at, trace_id)
VALUES ($1::bigint, $2::text, $3::bigint, $4::text, $5::smallint, $6::jsonb,
	COALESCE($7::timestamptz, now()), COALESCE($8::timestamptz, now()), $9::text)
RETURNING id`
	return query, []any{
		m.TenantID, m.AggregateType, m.AggregateID, m.EventType, version, string(m.Payload),
		orNull(m.OccurredAt, m.OccurredAt.IsZero()), orNull(m.AvailableAt, m.AvailableAt.IsZero()),
		orNull(m.TraceID, m.TraceID == ""),
	}, nil
}

func (m *Message) validate() error {
	switch {
	case m.EventType == "":
		return errors.New("no EventType")
	case m.EventVersion < 0:
		return fmt.Errorf("negative EventVersion %d", m.EventVersion)
	case len(m.Payload) == 0:
		return errors.New("no Payload")
	case !json.Valid(m.Payload):
		return errors.New("invalid Payload: not JSON")
	case !utf8.Valid(m.Payload):
		return errors.New("invalid Payload: not UTF-8")
	}
	return nil
}

func orNull(v any, null bool) any {
	if null {
		return nil
	}
	return v
}

type scanner interface{ Scan(dest ...any) error }

// queryRow knows database/sql by its types and pgx by its shape: this package
// depends on the standard library only, and so does a producer's build.
func queryRow(ctx context.Context, tx any, query string, args []any) (scanner, error) {
	if q, ok := tx.(interface {
		QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	}); ok {
		return q.QueryRowContext(ctx, query, args...), nil
	}
	if tx == nil {
		return nil, errors.New("no transaction, but nil")
	}
	method := reflect.ValueOf(tx).MethodByName("QueryRow")
	if !method.IsValid() || !isQueryRow(method.Type()) {
		return nil, fmt.Errorf("%T is neither a transaction of database/sql nor one of pgx", tx)
	}
	in := []reflect.Value{reflect.ValueOf(ctx), reflect.ValueOf(query), reflect.ValueOf(args)}
	out := method.CallSlice(in)
	row, ok := out[0].Interface().(scanner)
	if !ok {
		return nil, fmt.Errorf("%T returned no row", tx)
	}
	return row, nil
}

// isQueryRow reports whether t is func(context.Context, string, ...any) of a
// row: pgx's QueryRow, whose result has a type that cannot be named here.
func isQueryRow(t reflect.Type) bool {
	return t.IsVariadic() && t.NumIn() == 3 && t.NumOut() == 1 &&
		t.In(0) == reflect.TypeFor[context.Context]() &&
		t.In(1) == reflect.TypeFor[string]() &&
		t.In(2) == reflect.TypeFor[[]any]() &&
		t.Out(0).Implements(reflect.TypeFor[scanner]())
}
