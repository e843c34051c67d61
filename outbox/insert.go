package outbox

import (
	"context"
	"fmt"
	"strconv"
)

// DefaultTable is the outbox that `walpost migrate` creates.
const DefaultTable = "outbox_messages"

// Insert writes the event into a table of the canonical layout through tx and
// returns the row's id. An [Inserter] writes into other layouts.
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
// that others take, such as the escape \u0000.
func Insert(ctx context.Context, tx any, m Message) (id int64, err error) {
	var i Inserter
	text, err := i.Insert(ctx, tx, m)
	if err != nil {
		return 0, err
	}
	return number64(text)
}

// InsertMany is [Insert] for several events of one table, in one statement. The
// ids come in the order of the events. It makes all rows or none. No events are
// no statement, no ids and no error.
//
// A statement takes 65,535 values, so 7,281 events with all fields of the
// canonical table: more are an error, before anything is sent. Drivers that keep
// prepared statements keep one for every number of events.
func InsertMany(ctx context.Context, tx any, messages []Message) (ids []int64, err error) {
	var i Inserter
	texts, err := i.InsertMany(ctx, tx, messages)
	if err != nil {
		return nil, err
	}
	for _, text := range texts {
		id, err := number64(text)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, nil
}

func number64(text string) (int64, error) {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read the id of an inserted event: %w: "+
			"use an Inserter, whose ids are texts", err)
	}
	return id, nil
}

// Inserter writes events into a table of any layout. Its zero value writes into
// [DefaultTable]. It may be used by several goroutines and is not changed by
// use.
type Inserter struct {
	// Table is "table" or "schema.table", as that of [Message]. Default:
	// [DefaultTable].
	Table string
	// Layout names the columns, and is that of the relay's configuration. Default:
	// [Canonical].
	Layout Layout
	// HeadersColumn is a column of type jsonb or json for [Message.Headers]. The
	// relay carries only the columns that its configuration names. Default: none,
	// and a message with headers is an error.
	HeadersColumn string
	// TraceID is asked for a message without one: it returns the traceparent of
	// the context, or "" where there is none. Default: no trace.
	TraceID func(context.Context) string
	// CheckNames has every EventType pass [CheckEventType]. Default: any text.
	CheckNames bool
}

// Insert writes the event through tx, as the function [Insert] does, and
// returns the row's id as PostgreSQL renders it. A field that is set and has
// no column in the layout is an error that names both: nothing is left out.
func (i *Inserter) Insert(ctx context.Context, tx any, m Message) (id string, err error) {
	ids, err := i.insert(ctx, tx, []Message{m})
	if err != nil {
		return "", fmt.Errorf("insert event %q: %w", m.EventType, err)
	}
	return ids[0], nil
}

// InsertMany writes the events through tx, as the function [InsertMany] does,
// and returns the rows' ids in the order of the events. Ids that the
// application gives may be mixed with ids that the table makes.
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
		return nil, fmt.Errorf("write to %s: %w", &s.table, err)
	}
	if len(ids) != len(messages) {
		return nil, fmt.Errorf("%s took %d of %d events: look for a trigger or a rule on it "+
			"that leaves rows out", &s.table, len(ids), len(messages))
	}
	return ids, nil
}
