package publish

import (
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// Format is how an event's attributes travel.
type Format string

const (
	// FormatBinary puts the attributes into headers; the body is the payload's
	// own bytes.
	FormatBinary Format = "binary"
	// FormatCloudEvents wraps the payload into a CloudEvents JSON envelope.
	FormatCloudEvents Format = "cloudevents"
)

// EnvelopeConfig is what every message of a relay has in common.
type EnvelopeConfig struct {
	// Source is the namespace of the message ids and the ce-source: 1 to 256
	// bytes of printable ASCII without spaces and quotes.
	Source string
	// Stream is sent as Nats-Expected-Stream.
	Stream string
	// Format is FormatBinary where it is empty.
	Format Format
}

// Stamp is what the publisher knows about one message.
type Stamp struct {
	Ref      outbox.Ref
	Position outbox.Position
	// Staged: the message is one of a unit, which adds what is expected of the stream.
	Staged bool
	// Chained sends ExpectedLast as Nats-Expected-Last-Sequence.
	Chained      bool
	ExpectedLast uint64
	// Via says that Position is not the row's own; empty is not sent.
	Via string
	// Commit and N are then where the WAL has the row; zero, where that is not known, is
	// not sent.
	Commit outbox.LSN
	N      uint32
	// Replay is the number of the request where the row is published again on purpose, else 0.
	Replay int64
}

// Envelope turns events into messages. It is one goroutine's.
//
// Rows reach a message through its subject, its body, and the values of the
// headers named here; no row can name a header.
type Envelope struct {
	cfg        EnvelopeConfig
	source     string
	headers    *headers
	eventID    []byte // of the message that is being built
	body       []byte
	maxPayload int64
	maxMsgSize int64
	anyBytes   bool // see CheckText
}

// NewEnvelope checks the configuration. Sizes are unlimited until
// [Envelope.Limit].
func NewEnvelope(cfg EnvelopeConfig) (*Envelope, error) {
	if err := checkSource(cfg.Source); err != nil {
		return nil, hint.Errorf(
			"set source to a name of letters, digits and any of . _ - / : and keep it for ever",
			"source %+q: %w", cfg.Source, err)
	}
	e := &Envelope{cfg: cfg, source: cfg.Source, headers: newHeaders()}
	switch cfg.Format {
	case "", FormatBinary:
		e.cfg.Format = FormatBinary
		e.headers.fix(hSpecVersion, "1.0")
		e.headers.fix(hSource, string(appendPercent(nil, cfg.Source)))
	case FormatCloudEvents:
		e.headers.fix(hContentType, envelopeType)
	default:
		return nil, hint.Errorf("want binary or cloudevents", "nats.format %q: unknown", cfg.Format)
	}
	return e, nil
}

func checkSource(s string) error {
	if s == "" {
		return errors.New("empty")
	}
	if len(s) > 256 {
		return fmt.Errorf("%d bytes, the limit is 256", len(s))
	}
	for i := range len(s) {
		if s[i] <= ' ' || s[i] >= 0x7F || s[i] == '"' {
			return fmt.Errorf("%+q is not allowed", s[i])
		}
	}
	return nil
}

// Source is the source as it stands in headers and message ids.
func (e *Envelope) Source() string { return e.source }

// Limit sets the largest message, headers and body, in bytes: maxPayload is the
// connection's, maxMsgSize the stream's. Zero or less is unlimited.
func (e *Envelope) Limit(maxPayload int64, maxMsgSize int32) {
	e.maxPayload, e.maxMsgSize = maxPayload, int64(maxMsgSize)
}

// CheckText has Build look whether values are UTF-8: a database without an encoding takes
// any bytes for text.
func (e *Envelope) CheckText() { e.anyBytes = true }

// checkText refuses bytes that no consumer could read.
func checkText(ev *outbox.Event) error {
	for f := outbox.ID; f <= outbox.LastHeader; f++ {
		if v := ev.Values[f]; !utf8.Valid(v) {
			at := 0
			for r, n := utf8.DecodeRune(v); r != utf8.RuneError || n != 1; r, n = utf8.DecodeRune(v[at:]) {
				at += n
			}
			return rowErrorf(outbox.RowEncoding, "%s: byte %d is no UTF-8: %s",
				f, at, excerpt(v[at:min(len(v), at+8)]))
		}
	}
	return nil
}

// MostPayload is the longest payload that a message can have room for, in bytes.
func (e *Envelope) MostPayload() int {
	most := int64(natsMostPayload)
	for _, limit := range []int64{e.maxPayload, e.maxMsgSize} {
		if limit > 0 {
			most = min(most, limit)
		}
	}
	return int(most)
}

// natsMostPayload is the greatest max_payload that a server accepts.
const natsMostPayload = 64 << 20

// Build returns a message's header block, as it goes over the wire, and its body.
// Both are valid until the next Build or until the event's values are overwritten:
// send the message before. Its error is a [*outbox.RowError].
func (e *Envelope) Build(ev *outbox.Event, st Stamp) (header, body []byte, err error) {
	if err := checkAttributes(ev); err != nil {
		return nil, nil, err
	}
	if err := e.checkTotal(len(ev.Values[outbox.Payload])); err != nil {
		return nil, nil, err
	}
	if e.anyBytes {
		if err := checkText(ev); err != nil {
			return nil, nil, err
		}
	}
	h := e.headers
	h.begin()
	e.identify(st)
	if e.cfg.Format == FormatBinary {
		e.describe(ev)
	} else if trace := ev.Values[outbox.TraceID]; IsTraceparent(trace) {
		h.percent(hTraceparent, trace)
	}
	if err := e.addColumns(ev); err != nil {
		return nil, nil, err
	}
	h.end()
	body = e.data(ev)
	return h.block, body, e.checkSize(len(body))
}

// checkAttributes refuses what cannot make a message, before anything of that
// size is copied.
func checkAttributes(ev *outbox.Event) error {
	n := 0
	for f := outbox.ID; f <= outbox.LastHeader; f++ {
		if f != outbox.Payload {
			n += len(ev.Values[f])
		}
	}
	switch {
	case n > jetstream.MaxHeader:
		return rowErrorf(outbox.RowHeaders, "the attributes have %d bytes, headers at most %d",
			n, jetstream.MaxHeader)
	case len(ev.Values[outbox.ID]) == 0:
		return rowErrorf(outbox.RowHeaders, "id is NULL or empty")
	case len(ev.Values[outbox.ID]) > outbox.MaxID:
		return rowErrorf(outbox.RowHeaders, "id has %d bytes, the limit is %d",
			len(ev.Values[outbox.ID]), outbox.MaxID)
	case len(ev.Values[outbox.EventType]) == 0:
		return rowErrorf(outbox.RowHeaders, "event_type is NULL or empty")
	}
	return nil
}

// identify writes the headers that say which row this is and where it stands.
func (e *Envelope) identify(st Stamp) {
	h := e.headers
	e.eventID = st.Ref.AppendEventID(e.eventID[:0])
	if st.Replay != 0 {
		h.percent(hReplayOf, e.eventID)
		e.eventID = outbox.AppendReplay(e.eventID, st.Replay)
	}
	h.open(hMsgID)
	h.block = append(h.block, e.source...)
	h.block = append(h.block, '/')
	h.block = append(h.block, e.eventID...)
	h.close()
	if !st.Staged {
		h.put(hStream, e.cfg.Stream)
	}
	if st.Chained && !st.Staged {
		h.open(hExpectedLast)
		h.block = strconv.AppendUint(h.block, st.ExpectedLast, 10)
		h.close()
	}
	h.open(hPosition)
	h.block = st.Position.Append(h.block)
	h.close()
	if st.Via == "" {
		return
	}
	h.put(hVia, st.Via)
	if st.Commit != 0 {
		h.open(hCommit)
		h.block = st.Commit.Append(h.block)
		h.block = append(h.block, '/')
		h.block = strconv.AppendUint(h.block, uint64(st.N), 10)
		h.close()
	}
}

func (e *Envelope) data(ev *outbox.Event) []byte {
	if e.cfg.Format == FormatBinary {
		return ev.Values[outbox.Payload]
	}
	e.body = appendCloudEvent(e.body[:0], ev, e.eventID, e.source)
	return e.body
}

// checkOmitted refuses a row of which a value was not kept.
func (e *Envelope) checkOmitted(ev *outbox.Event) error {
	if len(ev.Omitted) == 0 {
		return nil
	}
	o := ev.Omitted[0]
	column, size := ev.Table.Layout.Columns[o.Field], strconv.Itoa(o.Size)
	if o.Size >= outbox.MostText {
		size = "more than 1,000,000,000"
	}
	if o.Field != outbox.Payload {
		return rowErrorf(outbox.RowHeaders, "column %+q has %s bytes, headers at most %d",
			column, size, jetstream.MaxHeader)
	}
	return rowErrorf(outbox.RowSize, "column %+q has %s bytes, a message at most %d", column, size,
		e.MostPayload())
}

func (e *Envelope) checkSize(body int) error {
	header := len(e.headers.block)
	if header > jetstream.MaxHeader {
		return rowErrorf(outbox.RowHeaders, "the headers have %d bytes, the limit is %d",
			header, jetstream.MaxHeader)
	}
	return e.checkTotal(header + body)
}

// Room is how many bytes of headers can be added to a message.
func (e *Envelope) Room(header, body int) int {
	room := int64(jetstream.MaxHeader - header)
	for _, limit := range []int64{e.maxPayload, e.maxMsgSize} {
		if limit > 0 {
			room = min(room, limit-int64(header+body))
		}
	}
	return int(room)
}

func (e *Envelope) checkTotal(n int) error {
	switch {
	case e.maxPayload > 0 && int64(n) > e.maxPayload:
		return rowErrorf(outbox.RowSize, "the message has %d bytes, the server's max_payload is %d", n,
			e.maxPayload)
	case e.maxMsgSize > 0 && int64(n) > e.maxMsgSize:
		return rowErrorf(outbox.RowSize, "the message has %d bytes, the stream's max_msg_size is %d",
			n, e.maxMsgSize)
	}
	return nil
}
