package publish

import (
	"encoding/json"
	"unicode/utf8"

	"github.com/walpost/walpost/outbox"
)

// The content types of payloads. They have no spaces: so they need no encoding in
// a header.
const (
	// envelopeType is that of [FormatCloudEvents].
	envelopeType = "application/cloudevents+json"

	jsonType   = "application/json"
	textType   = "text/plain;charset=utf-8"
	binaryType = "application/octet-stream"
)

// contentType says what a payload is, the same in both formats; "" where there is
// none. A payload that PostgreSQL holds as json or jsonb is not parsed for it.
func contentType(ev *outbox.Event) string {
	payload := ev.Values[outbox.Payload]
	switch {
	case len(payload) == 0:
		return ""
	case ev.Table.JSON[outbox.Payload] || isJSON(payload):
		return jsonType
	case utf8.Valid(payload):
		return textType
	}
	return binaryType
}

func isJSON(payload []byte) bool { return utf8.Valid(payload) && json.Valid(payload) }
