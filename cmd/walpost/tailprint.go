package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/walpost/walpost/internal/jetstream"
)

// eventTable writes one event a line, each column as wide as what it has held so far. On a terminal it begins
// with a heading and names the days.
type eventTable struct {
	w      io.Writer
	widths [6]int
	day    string
}

func newEventTable(w io.Writer) *eventTable {
	return &eventTable{w: w, widths: [6]int{12, 6, 12, 10, 6, 4}}
}

func (t *eventTable) print(m jetstream.Received) error {
	width, terminal := terminalWidth(t.w)
	at := m.At.UTC().Format("2006-01-02T15:04:05.000Z")
	if terminal {
		if err := t.begin(m.At.UTC().Format(time.DateOnly), width); err != nil {
			return err
		}
		at = m.At.UTC().Format("15:04:05.000")
	}
	cells := []string{at, fmt.Sprint(m.Seq), dash(m.Type), aggregateOf(m), dash(m.TenantID), dash(m.Row.ID)}
	for i := range cells {
		cells[i] = cell(cells[i])
		if terminal && i > 1 { // one long value leaves room for the payloads
			cells[i] = cut(cells[i], columnLimit(width))
		}
	}
	line := t.line(cells...)
	_, err := fmt.Fprintln(t.w, cut(line+remark(m)+bodyText(m.Payload, width), width))
	return err
}

// columnLimit is how wide a column gets on a terminal; 0 is no limit.
func columnLimit(width int) int {
	if width == 0 {
		return 0
	}
	return max(12, width/6)
}

// begin writes the heading and the day, where it is another one.
func (t *eventTable) begin(day string, width int) error {
	if day == t.day {
		return nil
	}
	text := cut(day+", times in UTC", width) + "\n"
	if t.day == "" {
		text += cut(t.line("TIME", "SEQ", "EVENT TYPE", "AGGREGATE", "TENANT", "ROW")+"PAYLOAD", width) + "\n"
	}
	t.day = day
	_, err := io.WriteString(t.w, text)
	return err
}

func (t *eventTable) line(cells ...string) string {
	var out strings.Builder
	for i, c := range cells {
		n := utf8.RuneCountInString(c)
		t.widths[i] = max(t.widths[i], n)
		pad := strings.Repeat(" ", t.widths[i]-n)
		if i == 1 { // the sequence: numbers stand right
			out.WriteString(pad + c + "  ")
			continue
		}
		out.WriteString(c + pad + "  ")
	}
	return out.String()
}

func aggregateOf(m jetstream.Received) string {
	if m.AggregateType == "" && m.AggregateID == "" {
		return "-"
	}
	return dash(m.AggregateType) + "/" + dash(m.AggregateID)
}

func remark(m jetstream.Received) string {
	switch {
	case !m.Relayed:
		return "[other writer, subject " + escape(m.Subject) + "] "
	case m.Row.Replay:
		return "[replay] "
	case m.Polled:
		return "[via poll] "
	}
	return ""
}

// bodyText is a payload in one line, and not much longer than the terminal is wide; 0 is no limit.
func bodyText(payload []byte, width int) string {
	var line bytes.Buffer
	if bytes.ContainsAny(payload, "\n\t") && json.Compact(&line, payload) == nil {
		payload = line.Bytes() // a column of type json keeps the producer's line breaks
	}
	if width > 0 {
		payload = payload[:min(len(payload), utf8.UTFMax*width)]
	}
	return escape(string(payload))
}

// eventObject is an event as --json has it; its names are a contract.
type eventObject struct {
	Sequence         uint64    `json:"sequence"`
	Stored           time.Time `json:"stored"`
	Subject          string    `json:"subject"`
	ID               *string   `json:"id"`
	Source           *string   `json:"source"`
	Type             *string   `json:"type"`
	AggregateType    *string   `json:"aggregate_type"`
	AggregateID      *string   `json:"aggregate_id"`
	TenantID         *string   `json:"tenant_id"`
	Version          *string   `json:"version"`
	AggregateVersion *string   `json:"aggregate_version"`
	Time             *string   `json:"time"`
	Trace            *string   `json:"trace"`
	Via              *string   `json:"via"`
	ReplayOf         *string   `json:"replay_of"`
	Position         *string   `json:"position"`
	Commit           *string   `json:"commit"`
	Outbox           *string   `json:"outbox"`
	RowID            *string   `json:"row_id"`
	Payload          any       `json:"payload"`
	PayloadBase64    []byte    `json:"payload_base64,omitempty"`
}

func asObject(m jetstream.Received) eventObject {
	e := eventObject{
		Sequence: m.Seq, Stored: m.At.UTC(), Subject: m.Subject,
		ID: orNull(m.ID), Source: orNull(m.Source), Type: orNull(m.Type), Time: orNull(m.Time),
		Trace: orNull(m.Trace), TenantID: orNull(m.TenantID),
		AggregateType: orNull(m.AggregateType), AggregateID: orNull(m.AggregateID),
		Version: orNull(m.EventVersion), AggregateVersion: orNull(m.AggregateVersion),
		Position: orNull(m.Position), Commit: orNull(m.Commit),
		Outbox: orNull(m.Row.Table), RowID: orNull(m.Row.ID),
	}
	e.ReplayOf = orNull(m.ReplayOf)
	switch {
	case m.Row.Replay:
		e.Via = orNull("replay")
	case m.Polled:
		e.Via = orNull("poll")
	case m.Relayed:
		e.Via = orNull("wal")
	}
	if utf8.Valid(m.Payload) {
		e.Payload = asDocument(orNull(string(m.Payload)))
	} else {
		e.PayloadBase64 = m.Payload
	}
	return e
}

// dash is [known] of what is empty where it is not known.
func dash(s string) string { return known(orNull(s)) }

func orNull(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}
