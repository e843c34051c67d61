package jetstream

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/outbox"
)

// Received is a message of the stream as a consumer meets it, in either format. What it
// does not say is empty.
type Received struct {
	Seq     uint64
	At      time.Time // when it was stored
	Subject string
	// Pending is how many messages that pass the filters are behind this one.
	Pending uint64
	// Relayed: a relay wrote it, of whatever source. Any other writer's messages have the
	// attributes that they give as CloudEvents do.
	Relayed bool
	// Row is what its message id says, where it is Relayed.
	Row outbox.MessageID

	ID, Source, Type, Time               string // of CloudEvents
	TenantID, AggregateType, AggregateID string
	AggregateVersion, EventVersion       string
	Trace                                string // traceparent, or whatever trace_id was
	// ReplayOf is the ID of the message that this one repeats on purpose.
	ReplayOf string
	// Polled: the row came from the table. Position and Commit are the headers' values.
	Polled           bool
	Position, Commit string

	// Header has all of the message's headers. The payload is without the envelope of the structured mode.
	Header  nats.Header
	Payload []byte
}

// received keeps the message's memory.
func received(msg *nats.Msg, meta *nats.MsgMetadata) Received {
	m := Received{
		Seq: meta.Sequence.Stream, At: meta.Timestamp, Subject: msg.Subject, Pending: meta.NumPending,
		Header: msg.Header, Payload: msg.Data,
	}
	m.Position, m.Commit = msg.Header.Get(PositionHeader), msg.Header.Get(CommitHeader)
	m.Polled = msg.Header.Get(ViaHeader) == ViaPoll && m.Commit == ""
	m.ReplayOf = unpercent(msg.Header.Get(ReplayOfHeader))
	if !m.unwrap(msg) {
		m.describe(msg.Header)
	}
	if _, err := outbox.ParsePosition(m.Position); err == nil {
		m.Row, m.Relayed = outbox.ParseMessageID(m.Source, msg.Header.Get(nats.MsgIdHdr))
	}
	return m
}

// describe reads the attributes of CloudEvents' binary mode.
func (m *Received) describe(h nats.Header) {
	read := func(name string) string { return unpercent(h.Get(name)) }
	m.ID, m.Source, m.Type, m.Time = read("ce-id"), read("ce-source"), read("ce-type"), read("ce-time")
	m.TenantID = read("ce-tenantid")
	m.AggregateType, m.AggregateID = read("ce-aggregatetype"), read("ce-aggregateid")
	m.AggregateVersion, m.EventVersion = read("ce-aggregateversion"), read("ce-eventversion")
	if m.Trace = read("traceparent"); m.Trace == "" {
		m.Trace = read("ce-traceid")
	}
}

// unwrap reads a message of CloudEvents' structured mode; false is no such message.
func (m *Received) unwrap(msg *nats.Msg) bool {
	if !strings.HasPrefix(msg.Header.Get(contentTypeHeader), structuredType) {
		return false
	}
	var e struct {
		ID, Source, Type, Time               string
		TenantID, AggregateType, AggregateID string
		AggregateVersion, EventVersion       string
		Traceparent, TraceID                 string
		DataContentType                      string
		Data                                 json.RawMessage
		Base64                               []byte `json:"data_base64"`
	}
	if json.Unmarshal(msg.Data, &e) != nil {
		return false
	}
	m.ID, m.Source, m.Type, m.Time = e.ID, e.Source, e.Type, e.Time
	m.TenantID, m.AggregateType, m.AggregateID = e.TenantID, e.AggregateType, e.AggregateID
	m.AggregateVersion, m.EventVersion = e.AggregateVersion, e.EventVersion
	if m.Trace = e.Traceparent; m.Trace == "" {
		m.Trace = e.TraceID
	}
	var text string
	switch {
	case e.Data == nil:
		m.Payload = e.Base64
	case e.DataContentType == plainTextType && json.Unmarshal(e.Data, &text) == nil:
		m.Payload = []byte(text)
	default:
		m.Payload = e.Data
	}
	return true
}

// unpercent decodes an attribute's value as the CloudEvents binding for NATS says. What is
// not encoded so stays as it is.
func unpercent(s string) string {
	const digits = "0123456789ABCDEF"
	if !strings.Contains(s, "%") {
		return s
	}
	out := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			high, low := strings.IndexByte(digits, s[i+1]), strings.IndexByte(digits, s[i+2])
			if high >= 0 && low >= 0 {
				out = append(out, byte(high<<4|low))
				i += 2
				continue
			}
		}
		out = append(out, s[i])
	}
	return string(out)
}
