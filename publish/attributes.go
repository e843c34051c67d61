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
	h.percent(hID, e.eventID)
	h.percent(hType, ev.Values[outbox.EventType])
	if kind := subjectType(ev); kind != nil {
		h.open(hSubject)
		h.block = appendPercent(h.block, kind)
		h.block = append(h.block, '/')
		h.block = appendPercent(h.block, ev.Values[outbox.AggregateID])
		h.close()
	}
	h.open(hTime)
	h.block = appendEventTime(h.block, ev)
	h.close()
	for _, x := range extensions {
		h.percent(x.header, ev.Values[x.field])
	}
	// Tracing libraries find a traceparent under its own name.
	if trace := ev.Values[outbox.TraceID]; IsTraceparent(trace) {
		h.percent(hTraceparent, trace)
	} else {
		h.percent(hTraceID, trace)
	}
	// Not as ce-datacontenttype: the bindings carry that attribute as content-type alone.
	h.put(hContentType, contentType(ev))
}

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

// subjectType is the first half of the CloudEvents subject "<aggregate
// type>/<aggregate id>"; nil where either half is missing.
func subjectType(ev *outbox.Event) []byte {
	if len(ev.Values[outbox.AggregateID]) == 0 || len(ev.Values[outbox.AggregateType]) == 0 {
		return nil
	}
	return ev.Values[outbox.AggregateType]
}

// appendEventTime appends occurred_at in RFC 3339, or nothing where the row has
// none that RFC 3339 can say. The commit's time is no substitute: only the WAL
// knows it, and the same row says the same when the table delivers it.
func appendEventTime(dst []byte, ev *outbox.Event) []byte {
	v := ev.Values[outbox.OccurredAt]
	if plainUTC(v) {
		dst = append(dst, v[:10]...)
		dst = append(dst, 'T')
		dst = append(dst, v[11:len(v)-len("+00")]...)
		return append(dst, 'Z')
	}
	if t, err := outbox.ParseTimestamp(v); err == nil && !t.IsZero() && t.Year() <= 9999 {
		return t.UTC().AppendFormat(dst, time.RFC3339Nano)
	}
	return dst
}

// plainUTC reports whether v is a timestamp as PostgreSQL writes most of them,
// "2026-11-20 09:00:00.25+00", and one that every calendar knows.
func plainUTC(v []byte) bool {
	const form = "0000-00-00 00:00:00"
	n := len(v) - len("+00")
	if n < len(form) || n > len(form)+len(".000000") || string(v[n:]) != "+00" {
		return false
	}
	for i := range n {
		want := byte('0')
		if i < len(form) {
			want = form[i]
		} else if i == len(form) {
			want = '.'
		}
		if digit := v[i] >= '0' && v[i] <= '9'; want == '0' && !digit || want != '0' && v[i] != want {
			return false
		}
	}
	if n == len(form)+1 || n > len(form) && v[n-1] == '0' {
		return false // RFC 3339 would have it shorter
	}
	two := func(i int) int { return int(v[i]-'0')*10 + int(v[i+1]-'0') }
	year := two(0)*100 + two(2)
	month, day := two(5), two(8)
	days := [...]int{31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31} // a 29th of February goes the long way
	return year > 0 && month >= 1 && month <= 12 && day >= 1 && day <= days[month-1] &&
		two(11) < 24 && two(14) < 60 && two(17) < 60
}
