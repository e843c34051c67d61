package publish

import (
	"bytes"
	"cmp"
	"errors"
	"slices"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// envelopeVersion is to be raised when an envelope comes to write other subjects, headers or bodies of the
// same row and settings.
const envelopeVersion = 1

// Form is what decides, beside a row, what its message is like.
type Form struct {
	Envelope int          `json:"envelope"`
	Subject  string       `json:"subject"` // the template
	Format   Format       `json:"format"`
	Headers  []FormHeader `json:"headers,omitempty"`
	// Moved: the stream stores messages on other subjects than they are published on.
	Moved bool `json:"moved,omitempty"`
}

// FormHeader is a column that becomes headers.
type FormHeader struct {
	Column string `json:"column"`
	Name   string `json:"name,omitempty"`
	JSON   bool   `json:"json,omitempty"`
}

// FormOf is the form of the messages of an outbox.
func FormOf(t *outbox.Table, subject string, format Format, moved bool) Form {
	f := Form{Envelope: envelopeVersion, Subject: subject, Format: cmp.Or(format, FormatBinary), Moved: moved}
	for i, name := range t.Layout.Headers {
		column := outbox.FirstHeader + outbox.Field(i)
		if !t.Layout.Has(column) {
			break
		}
		f.Headers = append(f.Headers, FormHeader{t.Layout.Columns[column], name, t.JSON[column]})
	}
	return f
}

// Equal reports whether messages of both forms are alike.
func (f Form) Equal(other Form) bool {
	return f.Envelope == other.Envelope && f.Subject == other.Subject && f.Format == other.Format &&
		slices.Equal(f.Headers, other.Headers) && f.Moved == other.Moved
}

// Likeness tells the messages of an outbox's rows from those that others publish under their ids. It is one
// goroutine's.
type Likeness struct {
	table    outbox.Table
	envelope *Envelope
	template *Template
	subject  []byte
	moved    bool
}

// NewLikeness returns an error for a form that messages of the outbox's rows cannot have, such as that of
// another version.
func NewLikeness(t *outbox.Table, f Form, source string) (*Likeness, error) {
	l := &Likeness{table: *t, moved: f.Moved}
	if f.Envelope != envelopeVersion || len(f.Headers) != len(FormOf(t, "", "", false).Headers) {
		return nil, errors.New("messages were made in another way")
	}
	for i, h := range f.Headers {
		column := outbox.FirstHeader + outbox.Field(i)
		l.table.Layout.Columns[column], l.table.Layout.Headers[i] = h.Column, h.Name
		l.table.JSON[column] = h.JSON
	}
	var err error
	if l.template, err = NewTemplate(f.Subject); err != nil {
		return nil, err
	}
	l.envelope, err = NewEnvelope(EnvelopeConfig{Source: source, Format: f.Format})
	return l, err
}

// build makes the message of a row, or of its replay; false is a row that cannot have one.
func (l *Likeness) build(
	ev *outbox.Event, ref outbox.Ref, replay int64,
) (sum jetstream.Sum, header, body []byte, ok bool) {
	row := *ev
	row.Table = &l.table
	subject, err := l.template.Render(l.subject[:0], &row)
	if err != nil || l.envelope.checkOmitted(&row) != nil {
		return sum, nil, nil, false
	}
	l.subject = subject
	header, body, err = l.envelope.Build(&row, Stamp{Ref: ref, Staged: true, Replay: replay})
	return jetstream.SumOfBlock(string(subject), header), header, body, err == nil
}

func (l *Likeness) same(a, b jetstream.Sum) bool {
	return a.Headers == b.Headers && (l.moved || a.Subject == b.Subject)
}

// Has reports whether a message of a row's id has its subject and headers. The event needs no payload.
func (l *Likeness) Has(ev *outbox.Event, ref outbox.Ref, sum jetstream.Sum) bool {
	own, _, _, ok := l.build(ev, ref, 0)
	if l.template.Partitions() > 0 && len(ev.Values[outbox.AggregateID]) == 0 {
		own.Subject = sum.Subject // the row's hash decides, which covers the payload
	}
	return ok && l.same(own, sum)
}

// Is reports whether a message is a row's own, or that of its replay, if the request has a number.
func (l *Likeness) Is(ev *outbox.Event, replay int64, m *jetstream.StoredMessage) bool {
	own, header, body, ok := l.build(ev, ev.Ref(), replay)
	if !ok || !l.same(own, m.Sum()) || !bytes.Equal(body, m.Body) {
		return false
	}
	kinds, line := m.Header[headerNames[hContentType]], "\r\n"+headerPrefixes[hContentType]
	if len(kinds) == 0 {
		return !bytes.Contains(header, []byte(line))
	}
	return len(kinds) == 1 && bytes.Contains(header, []byte(line+kinds[0]+"\r\n"))
}
