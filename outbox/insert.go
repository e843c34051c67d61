package outbox

import (
	"context"
	"fmt"
	"strconv"
)

// DefaultTable is the outbox that `walpost migrate` creates.
const DefaultTable = "outbox_messages"

// AppendTable is the outbox of layout append that it creates.
const AppendTable = "outbox_events"

// Insert writes the event into a table of the canonical layout through tx and
// returns the row's id. An [Inserter] writes into tables of other layouts.
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
// that others take, such as the escape \u0000. Roll tx back after any error.
func Insert(ctx context.Context, tx any, m Message) (id int64, err error) {
	var i Inserter
	text, err := i.Insert(ctx, tx, m)
	if err != nil {
		return 0, err
	}
	return numericID(text)
}

// InsertMany is [Insert] for several events of one table, in one statement: it writes all or none. The ids
// come in the order of the events. Without events it sends nothing and returns nil.
//
// A statement takes 65,535 values. That is 7,281 events with all fields of the canonical table; more are an
// error before anything is sent. A driver that keeps prepared statements keeps one for each number of events:
// insert in parts of the same size where the numbers vary much.
func InsertMany(ctx context.Context, tx any, messages []Message) (ids []int64, err error) {
	var i Inserter
	texts, err := i.InsertMany(ctx, tx, messages)
	if err != nil {
		return nil, err
	}
	for _, text := range texts {
		id, err := numericID(text)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func numericID(text string) (int64, error) {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read the id of an inserted event: %w: "+
			"use an Inserter, which returns ids as texts", err)
	}
	return id, nil
}

// Inserter writes events into a table of any layout. Its zero value writes into
// [DefaultTable]. Several goroutines may use it at once.
type Inserter struct {
	// Table is "table" or "schema.table", as that of [Message], which goes before it. Default:
	// [DefaultTable].
	Table string
	// Layout names the columns, as in the relay's configuration. Default:
	// [Canonical].
	Layout Layout
	// HeadersColumn is a column of type jsonb or json for [Message.Headers]. The relay sends what it holds
	// where outboxes[].headers names it. Default: none, and a message with headers is an error.
	HeadersColumn string
	// TraceID returns the W3C traceparent of the context, or "" where there is none. It is asked for each
	// message that has no TraceID. Default: no trace.
	TraceID func(context.Context) string
	// CheckNames refuses event types that [CheckEventType] refuses. Default: any text.
	CheckNames bool
	// Check is asked about each message before anything is sent; its error refuses the message, and with it
	// the statement. The method CheckMessage of package catalog is one. Default: no check.
	Check func(Message) error
}

// Insert writes the event through tx, as the function [Insert] does, and
// returns the row's id as PostgreSQL renders it. A field that is set and has
// no column in the layout is an error: no field is left out silently.
func (i *Inserter) Insert(ctx context.Context, tx any, m Message) (id string, err error) {
	ids, err := i.insert(ctx, tx, []Message{m})
	if err != nil {
		return "", fmt.Errorf("insert event %q: %w", m.EventType, err)
	}
	return ids[0], nil
}

// InsertMany writes the events through tx, as the function [InsertMany] does,
// and returns the rows' ids in the order of the events. Some events may have an
// ID while the table makes the others'.
func (i *Inserter) InsertMany(ctx context.Context, tx any, messages []Message) (ids []string, err error) {
	if len(messages) == 0 {
		return nil, nil
	}
	ids, err = i.insert(ctx, tx, messages)
	if err != nil {
		return nil, fmt.Errorf("insert %d events: %w", len(messages), err)
	}
	return ids, nil
}

func (i *Inserter) insert(ctx context.Context, tx any, messages []Message) (ids []string, err error) {
	s, err := i.statement(ctx, messages)
	if err != nil {
		return nil, err
	}
	row, err := queryRow(ctx, tx, s.sql(), s.args())
	if err != nil {
		return nil, err
	}
	if ids, err = scanIDs(row); err != nil {
		return nil, s.explain(err)
	}
	if len(ids) != len(messages) {
		return nil, fmt.Errorf("%s took %d of %d events: look for a trigger or a rule on it "+
			"that leaves rows out", &s.table, len(ids), len(messages))
	}
	return ids, nil
}
