package publish

import (
	"encoding/base64"
	"unicode/utf8"

	"github.com/walpost/walpost/outbox"
)

// appendCloudEvent appends the event in the CloudEvents JSON format. The payload
// goes in unchanged where it is one JSON value, so that numbers and the order of
// keys survive. Any other text goes in as a string, other bytes as data_base64:
// spliced in as it is, it could end the object's data and add attributes.
func appendCloudEvent(dst []byte, ev *outbox.Event, id []byte, source string) []byte {
	dst = append(dst, `{"specversion":"1.0"`...)
	dst = appendMember(dst, "id", id)
	dst = appendMember(dst, "source", source)
	dst = appendMember(dst, "type", ev.Values[outbox.EventType])
	if t := subjectType(ev); t != nil {
		dst = append(dst, `,"subject":"`...)
		dst = appendJSONText(dst, t)
		dst = append(dst, '/')
		dst = appendJSONText(dst, ev.Values[outbox.AggregateID])
		dst = append(dst, '"')
	}
	dst = appendMember(dst, "time", appendEventTime(make([]byte, 0, 40), ev))
	for _, x := range extensions {
		dst = appendMember(dst, x.name, ev.Values[x.field])
	}
	if trace := ev.Values[outbox.TraceID]; IsTraceparent(trace) {
		dst = appendMember(dst, "traceparent", trace)
	} else {
		dst = appendMember(dst, "traceid", trace)
	}
	kind := contentType(ev)
	dst = appendMember(dst, "datacontenttype", kind)
	dst = appendJSONData(dst, kind, ev.Values[outbox.Payload])
	return append(dst, '}')
}

// appendJSONData does not take the column's type for a proof: a table can change
// while its rows are read.
func appendJSONData(dst []byte, kind string, payload []byte) []byte {
	switch {
	case kind == jsonType && isJSON(payload):
		dst = append(dst, `,"data":`...)
		return append(dst, payload...)
	case kind == textType:
		return appendMember(dst, "data", payload)
	case kind == "":
		return dst
	}
	dst = append(dst, `,"data_base64":"`...)
	dst = base64.StdEncoding.AppendEncode(dst, payload)
	return append(dst, '"')
}

// appendMember appends an attribute, unless it is empty.
func appendMember[T string | []byte](dst []byte, name string, value T) []byte {
	if len(value) == 0 {
		return dst
	}
	dst = append(dst, `,"`...)
	dst = append(dst, name...)
	dst = append(dst, `":"`...)
	dst = appendJSONText(dst, value)
	return append(dst, '"')
}

// appendJSONText appends the inside of a JSON string.
func appendJSONText[T string | []byte](dst []byte, v T) []byte {
	for i := 0; i < len(v); {
		c := v[i]
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c < ' ' || c == 0x7F:
			dst = append(dst, '\\', 'u', '0', '0', upperHex[c>>4], upperHex[c&0xF])
		case c < utf8.RuneSelf:
			dst = append(dst, c)
		default:
			r, n := utf8.DecodeRuneInString(string(v[i:min(i+utf8.UTFMax, len(v))]))
			dst = utf8.AppendRune(dst, r) // U+FFFD in place of what is not UTF-8
			i += n
			continue
		}
		i++
	}
	return dst
}
