package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"math"
	"sync"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// Likenesses tell the messages of rows from those that others have published under their ids, by what the
// messages were like when they were stored. They may be used by several goroutines.
type Likenesses struct {
	mu sync.Mutex
	of map[*outbox.Table][]likeness
}

// likeness is that of a delivery's messages from one sequence to below another; nil where it is not known.
type likeness struct {
	from, to uint64
	*publish.Likeness
}

// mostForms is how many forms are remembered of a delivery. Of older messages only the payload is compared.
const mostForms = 100

// formsOf are those of a delivery whose next message has the form: those that its messages in the stream may
// have, and that one.
func formsOf(of *table.Sent, next publish.Form, info *jetstream.StreamInfo) []table.SentForm {
	forms := remembered(of, info)
	for n := len(forms); n > 0 && forms[n-1].From > info.LastSeq+1; n-- {
		forms = forms[:n-1] // the stream has lost its messages
	}
	for len(forms) > 1 && (forms[1].From <= info.FirstSeq || len(forms) >= mostForms) {
		forms = forms[1:]
	}
	if n := len(forms); n > 0 {
		var last publish.Form
		if json.Unmarshal(forms[n-1].Form, &last) == nil && last.Equal(next) {
			return forms
		}
		if forms[n-1].From == info.LastSeq+1 {
			forms = forms[:n-1]
		}
	}
	return append(forms, sentForm(info.LastSeq+1, next))
}

func sentForm(from uint64, f publish.Form) table.SentForm {
	text, err := json.Marshal(f)
	if err != nil {
		panic(err) // it has texts and numbers only
	}
	return table.SentForm{From: from, Form: text}
}

// remembered are the forms of a delivery's messages in this stream.
func remembered(of *table.Sent, info *jetstream.StreamInfo) []table.SentForm {
	if !isOf(of, info) {
		return nil
	}
	return of.Forms
}

// Form is how a relay makes messages.
type Form struct {
	Source, Stream, Domain string
	Subject                string // the template
	Format                 publish.Format
}

func (s *servers) form() Form {
	return Form{
		s.envelope.Source(), s.cfg.Stream.Name, s.cfg.Stream.Domain, s.cfg.Subject, s.cfg.Format,
	}
}

func (f Form) of(t *outbox.Table) publish.Form { return publish.FormOf(t, f.Subject, f.Format) }

// Likenesses are those of the messages of outboxes, by what outbox_sent knows of deliveries to the stream.
// The next messages are of this form.
func (f Form) Likenesses(
	outboxes []*outbox.Table, known []table.Sent, info *jetstream.StreamInfo,
) *Likenesses {
	l := &Likenesses{of: map[*outbox.Table][]likeness{}}
	for _, t := range outboxes {
		now := table.SentOf(t, f.Source, f.Stream, f.Domain)
		of := table.Sent{}
		for _, k := range known {
			switch {
			case k.SameDelivery(&now):
				of = k
			case k.SameMessages(&now):
				l.add(t, remembered(&k, info), f.Source, info)
			}
		}
		l.add(t, formsOf(&of, f.of(t), info), f.Source, info)
	}
	return l
}

// Own is Likenesses for verify.
func (f Form) Own(
	outboxes []*outbox.Table, known []table.Sent, info *jetstream.StreamInfo,
) func(*outbox.Table, *jetstream.Message, *outbox.Event) bool {
	return f.Likenesses(outboxes, known, info).Has
}

// otherLikenesses are those of messages in a stream of which outbox_sent knows nothing.
func (s *servers) otherLikenesses(subject string, info *jetstream.StreamInfo) *Likenesses {
	l := &Likenesses{of: map[*outbox.Table][]likeness{}}
	for _, t := range s.outboxes {
		form := sentForm(0, publish.FormOf(t, subject, s.cfg.Format))
		l.add(t, []table.SentForm{form}, s.envelope.Source(), info)
	}
	return l
}

func (l *Likenesses) add(
	t *outbox.Table, forms []table.SentForm, source string, info *jetstream.StreamInfo,
) {
	moved := info.Config.SubjectTransform != nil
	for i, f := range forms {
		one := likeness{from: f.From, to: math.MaxUint64}
		if i+1 < len(forms) {
			one.to = forms[i+1].From
		}
		var form publish.Form
		if json.Unmarshal(f.Form, &form) == nil {
			one.Likeness, _ = publish.NewLikeness(t, form, source, moved) // nil at an error
		}
		l.of[t] = append(l.of[t], one)
	}
}

// any reports whether is is true of one of the likenesses that messages had at a sequence. known is false if
// they may have had another one.
func (l *Likenesses) any(
	t *outbox.Table, seq uint64, is func(*publish.Likeness) bool,
) (has, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, one := range l.of[t] {
		if seq < one.from || seq >= one.to {
			continue
		}
		if one.Likeness == nil {
			return false, false
		}
		known = true
		if is(one.Likeness) {
			return true, true
		}
	}
	return false, known
}

// Has reports whether a message has the subject and the headers of the row whose id it has. The row needs no
// payload.
func (l *Likenesses) Has(t *outbox.Table, m *jetstream.Message, ev *outbox.Event) bool {
	ref := refOf(t, *m)
	has, known := l.any(t, m.Seq, func(one *publish.Likeness) bool { return one.Has(ev, ref, m.Sum) })
	return has || !known
}

// is reports whether a message is the row's own, or that of its replay, if the request has a number.
func (l *Likenesses) is(ev *outbox.Event, replay int64, m *jetstream.StoredMessage) bool {
	is, known := l.any(ev.Table, m.Seq, func(one *publish.Likeness) bool { return one.Is(ev, replay, m) })
	if known {
		return is
	}
	return bytes.Equal(bytes.Trim(ev.Values[outbox.Payload], jetstream.Space), m.Payload())
}

// own looks at the message at a sequence. One that is gone counts as the row's own.
func (l *Likenesses) own(
	ctx context.Context, from *jetstream.Stream, ev *outbox.Event, replay int64, seq uint64,
) (bool, error) {
	stored, err := readMessages(ctx, from, []uint64{seq})
	if err != nil || stored[0] == nil {
		return err == nil, err
	}
	return l.is(ev, replay, stored[0]), nil
}
