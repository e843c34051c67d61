package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/table"
)

// listLetters writes a table, each line as wide as the terminal at most, how many there are beside it, and
// what last says.
func listLetters(
	ctx context.Context, w io.Writer, q *deadletter.Queue, f deadletter.Filter, last string,
) error {
	var text bytes.Buffer
	columns := tabwriter.NewWriter(&text, 0, 0, 2, ' ', 0)
	fmt.Fprintln(columns, "ID\tOUTBOX\tROW\tEVENT TYPE\tAGGREGATE\tATTEMPTS\tAGE\tERROR")
	shown := 0
	err := q.List(ctx, f, func(l deadletter.Letter) error {
		shown++
		attempts := "-"
		if l.Attempts != nil {
			attempts = fmt.Sprint(*l.Attempts)
		}
		_, err := fmt.Fprintf(columns, "%d\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			l.ID, cell(l.Outbox), cell(l.RowID), cell(known(l.EventType)), cell(aggregate(l)),
			attempts, since(l.Age), escape(known(l.LastError)))
		return err
	})
	if err != nil {
		return err
	}
	more := 0
	if shown > 0 && shown == f.Limit {
		n, err := q.Count(ctx, f, shown+countMost)
		if err != nil {
			return err
		}
		more = max(0, n-shown)
	}
	if err := columns.Flush(); err != nil {
		return err
	}
	if shown > 0 {
		writeTable(w, text.String())
	}
	_, err = fmt.Fprintln(w, total(shown, more)+last)
	return err
}

// writeTable writes each line as wide as the terminal at most.
func writeTable(w io.Writer, text string) {
	width, _ := terminalWidth(w)
	for line := range strings.Lines(text) {
		fmt.Fprintln(w, cut(strings.TrimRight(line, " \n"), width))
	}
}

func total(shown, more int) string {
	switch {
	case more >= countMost:
		return fmt.Sprintf("%s, and more than %d more", count(shown, "dead letter"), countMost)
	case more > 0:
		return fmt.Sprintf("%s, and %d more", count(shown, "dead letter"), more)
	}
	return count(shown, "dead letter")
}

func known(s *string) string {
	if s == nil {
		return "-"
	}
	return *s
}

func aggregate(l deadletter.Letter) string { return aggregateText(l.AggregateType, l.AggregateID) }

func aggregateText(kind, id *string) string {
	if kind == nil && id == nil {
		return "-"
	}
	return known(kind) + "/" + known(id)
}

// cell keeps a column of the table narrow enough for the others.
func cell(s string) string { return cut(escape(cut(s, 40)), 40) }

func since(d time.Duration) string {
	switch {
	case d < 2*time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < 2*time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < 48*time.Hour:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/(24*time.Hour))
}

func showLetter(w io.Writer, l *deadletter.Whole, asJSON bool) error {
	l.FailedAt = l.FailedAt.UTC()
	if asJSON {
		unread := l.Size
		if l.Original != nil {
			unread = 0
		}
		return printJSON(w, struct {
			deadletter.Letter
			Payload  any             `json:"payload"`
			Original json.RawMessage `json:"original"`
			Size     int             `json:"original_bytes,omitempty"`
		}{l.Letter, asDocument(l.Payload), l.Original, unread})
	}
	attempts := "-"
	if l.Attempts != nil {
		attempts = fmt.Sprint(*l.Attempts)
	}
	for _, line := range [][2]string{
		{"dead letter", fmt.Sprint(l.ID)},
		{"outbox", l.Outbox},
		{"row", l.RowID},
		{"event type", known(l.EventType)},
		{"tenant", known(l.TenantID)},
		{"aggregate", aggregate(l.Letter)},
		{"attempts", attempts},
		{"failed at", l.FailedAt.Format(time.RFC3339) + " (" + since(l.Age) + " ago)"},
		{"last error", known(l.LastError)},
		{"what helps", deadletter.Cure(deadletter.Class(known(l.LastError)))},
	} {
		if line[1] != "" {
			fmt.Fprintf(w, "%-12s %s\n", line[0], escape(line[1]))
		}
	}
	fmt.Fprintln(w, "\nThe row as it was:")
	for _, c := range l.Columns {
		text := pretty(c.Value)
		if c.Value == nil && c.Size > 0 {
			text = fmt.Sprintf("%d bytes, in SELECT original ->> '%s' FROM %s WHERE dead_letter_id = %d",
				c.Size, escape(strings.ReplaceAll(c.Name, "'", "''")), table.DeadLetters, l.ID)
		}
		if _, err := fmt.Fprintf(w, "    %s: %s\n", escape(c.Name), text); err != nil {
			return err
		}
	}
	return nil
}

// pretty renders a value; a JSON object or array over several lines.
func pretty(value *string) string {
	if value == nil {
		return "NULL"
	}
	var out bytes.Buffer
	if !strings.ContainsAny((*value)[:min(1, len(*value))], "{[") || depth(*value) > 100 ||
		json.Indent(&out, []byte(*value), "    ", "  ") != nil {
		return escape(*value)
	}
	lines := strings.Split(out.String(), "\n")
	for i := range lines {
		lines[i] = escape(lines[i])
	}
	return strings.Join(lines, "\n")
}

// depth is how deep brackets are nested: a hostile document of 10,000 levels would be indented to a hundred
// megabytes.
func depth(s string) (deepest int) {
	now := 0
	for i := range len(s) {
		switch s[i] {
		case '{', '[':
			now++
		case '}', ']':
			now--
		}
		deepest = max(deepest, now)
	}
	return deepest
}

func asDocument(s *string) any {
	if s != nil && json.Valid([]byte(*s)) {
		return json.RawMessage(*s)
	}
	return s
}

// printJSON writes one line.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	return e.Encode(v)
}
