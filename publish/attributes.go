package publish

import (
	"time"

	"github.com/walpost/walpost/outbox"
)

// describe writes the event's attributes as CloudEvents binary mode has them.
// ce-id is encoded once more, like every value: decoded, source + "/" + id is
// the message id.
func (e *Envelope) describe(ev *outbox.Event) {
	h := e.headers
	id := h.text[len(e.source)+len("/") : h.ends[hMsgID]]
	h.text = appendPercent(h.text, id)
	h.end(hID)
	h.text = appendPercent(h.text, ev.Values[outbox.EventType])
	h.end(hType)
	h.text = appendPercent(h.text, subjectType(ev))
	if subjectType(ev) != nil {
		h.text = append(h.text, '/')
		h.text = appendPercent(h.text, ev.Values[outbox.AggregateID])
	}
	h.end(hSubject)
	h.text = appendEventTime(h.text, ev)
	h.end(hTime)
	for _, x := range extensions {
		h.text = appendPercent(h.text, ev.Values[x.field])
		h.end(x.header)
	}
	e.trace(ev.Values[outbox.TraceID])
	contentType := ""
	if len(ev.Values[outbox.Payload]) > 0 {
		contentType = jsonType
	}
	h.put(hDataContentType, contentType)
	h.put(hContentType, contentType)
}

const jsonType = "application/json"

// extensions are the attributes that CloudEvents does not name, in the headers'
// order.
var extensions = []struct {
	field  outbox.Field
	header header
	name   string
}{
	{outbox.TenantID, hTenantID, "tenantid"},
	{outbox.AggregateType, hAggregateType, "aggregatetype"},
	{outbox.AggregateID, hAggregateID, "aggregateid"},
	{outbox.AggregateVersion, hAggregateVersion, "aggregateversion"},
	{outbox.EventVersion, hEventVersion, "eventversion"},
}

// trace passes a W3C traceparent on under its own name, so that tracing
// libraries find it, and any other trace id as an attribute.
func (e *Envelope) trace(id []byte) {
	h := e.headers
	if isTraceparent(id) {
		h.end(hTraceID)
		h.text = append(h.text, id...)
		h.end(hTraceparent)
		return
	}
	h.text = appendPercent(h.text, id)
	h.end(hTraceID)
}

// subjectType is the first half of the CloudEvents subject "<aggregate
// type>/<aggregate id>"; nil where either half is missing.
func subjectType(ev *outbox.Event) []byte {
	if len(ev.Values[outbox.AggregateID]) == 0 || len(ev.Values[outbox.AggregateType]) == 0 {
		return nil
	}
	return ev.Values[outbox.AggregateType]
}

// appendEventTime appends occurred_at in RFC 3339, or the commit's time where
// the row has none that RFC 3339 can say, or nothing.
func appendEventTime(dst []byte, ev *outbox.Event) []byte {
	if v := ev.Values[outbox.OccurredAt]; v != nil {
		if t, err := outbox.ParseTimestamp(v); err == nil && !t.IsZero() && t.Year() <= 9999 {
			return t.UTC().AppendFormat(dst, time.RFC3339Nano)
		}
	}
	if ev.CommitTime.IsZero() {
		return dst
	}
	return ev.CommitTime.UTC().AppendFormat(dst, time.RFC3339Nano)
}
