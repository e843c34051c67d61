package publish

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

// maxSubject is the longest subject, in bytes, that is sent. A control line of
// more than 4,096 bytes makes the server close the connection for good, and the
// reply subject shares that line.
const maxSubject = 1024

// Template builds a row's subject, as in "events.{event_type}".
//
// {event_type} is validated and keeps its dots, so that subscribers can take
// events.order.> of order.placed. Every other placeholder is encoded into one
// token: bytes other than letters, digits, '_' and '-' become %XX.
//
// {partition/N} is the first token where it is used: the event's partition of N, from 0 to N-1. It is the one
// that package consume computes, see [outbox.PartitionHash].
type Template struct {
	text       string
	parts      []part
	partitions int // N of {partition/N}, 0 without it
}

// part is a literal or, where that is empty, a placeholder.
type part struct {
	literal   string
	partition bool
	field     outbox.Field
}

// maxPartitions bounds N: the stream lists a subject for each.
const maxPartitions = 256

var placeholders = map[string]outbox.Field{
	"event_type":     outbox.EventType,
	"tenant_id":      outbox.TenantID,
	"aggregate_type": outbox.AggregateType,
	"aggregate_id":   outbox.AggregateID,
	"event_version":  outbox.EventVersion,
}

const templateHint = "nats.subject is literal tokens and the placeholders " +
	"{event_type} {tenant_id} {aggregate_type} {aggregate_id} {event_version}, " +
	"joined by dots, as in events.{event_type}; {partition/N} may be the first token"

// NewTemplate parses and validates a template.
func NewTemplate(s string) (*Template, error) {
	t := &Template{text: s}
	err := t.parse()
	if err == nil {
		err = t.checkTokens()
	}
	if err != nil {
		return nil, hint.Errorf(templateHint, "subject template %q: %w", s, err)
	}
	return t, nil
}

func (t *Template) parse() error {
	for rest := t.text; rest != ""; {
		literal, after, found := strings.Cut(rest, "{")
		if err := checkLiteral(literal); err != nil {
			return err
		}
		if literal != "" {
			t.parts = append(t.parts, part{literal: literal})
		}
		if !found {
			return nil
		}
		name, after, closed := strings.Cut(after, "}")
		if !closed {
			return fmt.Errorf("placeholder {%s is not closed", name)
		}
		if err := t.addPlaceholder(name); err != nil {
			return err
		}
		rest = after
	}
	return nil
}

func (t *Template) addPlaceholder(name string) error {
	if n, ok := strings.CutPrefix(name, "partition/"); ok {
		return t.addPartition(n)
	}
	f, known := placeholders[name]
	if !known {
		return fmt.Errorf("unknown placeholder {%s}", name)
	}
	t.parts = append(t.parts, part{field: f})
	return nil
}

func (t *Template) addPartition(number string) error {
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > maxPartitions || strconv.Itoa(n) != number {
		return fmt.Errorf("placeholder {partition/%s}: want a number from 1 to %d", number, maxPartitions)
	}
	first, _, more := strings.Cut(t.text, ".")
	if !more || first != "{partition/"+number+"}" || len(t.parts) > 0 {
		return fmt.Errorf("{partition/%d} is not the first token, before others", n)
	}
	t.partitions = n
	t.parts = append(t.parts, part{partition: true})
	return nil
}

func checkLiteral(s string) error {
	for i := range len(s) {
		switch c := s[i]; {
		case c == '*' || c == '>':
			return fmt.Errorf("wildcard %q in a literal part", c)
		case c == '}':
			return fmt.Errorf("a } without its {")
		case c <= ' ' || c >= 0x7F:
			return fmt.Errorf("%+q in a literal part, want printable ASCII without spaces", c)
		}
	}
	return nil
}

func (t *Template) checkTokens() error {
	if len(t.text) > maxSubject/2 {
		return fmt.Errorf("%d bytes, the limit is %d", len(t.text), maxSubject/2)
	}
	tokens := strings.Split(t.text, ".")
	for _, token := range tokens {
		if token == "" {
			return fmt.Errorf("empty token")
		}
	}
	if tokens[0][0] == '$' || tokens[0] == "_INBOX" {
		return fmt.Errorf("the first token %q is reserved by NATS", tokens[0])
	}
	return nil
}

func (t *Template) String() string { return t.text }

// Pattern is the narrowest NATS wildcard that matches every subject the
// template can render: "events.>" of "events.{event_type}". With {partition/N} its first token is *.
func (t *Template) Pattern() string {
	tokens := strings.Split(t.text, ".")
	for i, token := range tokens {
		if strings.Contains(token, "{event_type}") {
			tokens[i] = ">"
			return strings.Join(tokens[:i+1], ".")
		}
		if strings.Contains(token, "{") {
			tokens[i] = "*"
		}
	}
	return strings.Join(tokens, ".")
}

// Partitions is the N of {partition/N}, 0 without it.
func (t *Template) Partitions() int { return t.partitions }

// CheckLayout fails where the template needs a column that the table's layout
// does not map: no row of it could ever be sent.
func (t *Template) CheckLayout(table *outbox.Table) error {
	for _, p := range t.parts {
		if p.literal == "" && !p.partition && !table.Layout.Has(p.field) {
			return hint.Errorf(
				"take the placeholder out of nats.subject, or map a column to "+p.field.String(),
				"subject template %q: table %s has no column for {%s}", t.text, table, p.field)
		}
	}
	return nil
}
