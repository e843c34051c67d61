package relay

import (
	"bytes"
	"context"
	"encoding/json"
	"slices"
	"sync"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// Likenesses tell the messages of rows from those that others have published under their ids, by what the
// messages of their deliveries were like so far. They may be used by several goroutines.
type Likenesses struct {
	mu sync.Mutex
	of map[*outbox.Table]*tableLikenesses
}

type tableLikenesses struct {
	from uint64 // what earlier messages were like is not known
	all  []*publish.Likeness
}

// mostForms is how many forms are remembered of a delivery.
const mostForms = 100

// formsOf are those that messages of a delivery in the stream may have, and the next one has. They are not
// told apart by sequences: stream and database may have been restored to different times.
func formsOf(of *table.Sent, next publish.Form, info *jetstream.StreamInfo) []table.SentForm {
	forms := remembered(of, info)
	for _, f := range forms {
		var one publish.Form
		if json.Unmarshal(f.Form, &one) == nil && one.Equal(next) {
			return forms
		}
	}
	if n := len(forms); n >= mostForms {
		// The first one says since when they are known.
		forms = slices.Concat(forms[:1], forms[n-mostForms+2:])
	}
	return append(slices.Clone(forms), sentForm(info.LastSeq+1, next))
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

func (f Form) of(t *outbox.Table, info *jetstream.StreamInfo) publish.Form {
	return publish.FormOf(t, f.Subject, f.Format, info.Config.SubjectTransform != nil)
}

// Likenesses are those of the messages of outboxes, by what outbox_sent knows of deliveries to the stream.
// The next messages are of this form.
func (f Form) Likenesses(
	outboxes []*outbox.Table, known []table.Sent, info *jetstream.StreamInfo,
) *Likenesses {
	l := &Likenesses{of: map[*outbox.Table]*tableLikenesses{}}
	for _, t := range outboxes {
		now := table.SentOf(t, f.Source, f.Stream, f.Domain)
		of := table.Sent{}
		for _, k := range known {
			switch {
			case k.SameDelivery(&now):
				of = k
			case k.SameMessages(&now):
				l.add(t, remembered(&k, info), f.Source)
			}
		}
		l.add(t, formsOf(&of, f.of(t, info), info), f.Source)
	}
	return l
}

// Own is Likenesses for verify.
func (f Form) Own(
	outboxes []*outbox.Table, known []table.Sent, info *jetstream.StreamInfo,
) func(*outbox.Table, *jetstream.Message, *outbox.Event) bool {
	return f.Likenesses(outboxes, known, info).Has
}

// otherLikenesses are those of messages of replays in a stream of which outbox_sent knows nothing.
func (s *servers) otherLikenesses(subject string, info *jetstream.StreamInfo) *Likenesses {
	f := Form{Source: s.envelope.Source(), Subject: subject, Format: s.cfg.Format}
	l := f.Likenesses(s.outboxes, nil, info)
	for _, of := range l.of {
		of.from = 0 // else payloads alone would be compared
	}
	return l
}

func (l *Likenesses) add(t *outbox.Table, forms []table.SentForm, source string) {
	for _, f := range forms {
		of := l.of[t]
		if of == nil {
			of = &tableLikenesses{from: f.From}
			l.of[t] = of
		}
		of.from = min(of.from, f.From)
		var form publish.Form
		if json.Unmarshal(f.Form, &form) != nil {
			continue
		}
		if one, err := publish.NewLikeness(t, form, source); err == nil { // or the rows have other ids now
			of.all = append(of.all, one)
		}
	}
}

// any reports whether is is true of one of the likenesses that messages have. known is false if a message at
// a sequence may have another one.
func (l *Likenesses) any(
	t *outbox.Table, seq uint64, is func(*publish.Likeness) bool,
) (has, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := l.of[t]
	if of == nil || seq < of.from {
		return false, false
	}
	return slices.ContainsFunc(of.all, is), true
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
