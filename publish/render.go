package publish

import (
	"strconv"

	"github.com/walpost/walpost/outbox"
)

// Render appends the event's subject to dst. Its error is a [*outbox.RowError], and
// dst is then returned as it came.
func (t *Template) Render(dst []byte, ev *outbox.Event) ([]byte, error) {
	start := len(dst)
	out := dst
	for _, p := range t.parts {
		if p.literal != "" {
			out = append(out, p.literal...)
			continue
		}
		if p.partition {
			out = strconv.AppendInt(out, int64(partition(ev, t.partitions)), 10)
			continue
		}
		v := ev.Values[p.field]
		if err := checkValue(p.field, v); err != nil {
			return dst, err
		}
		if p.field == outbox.EventType {
			out = append(out, v...)
		} else {
			out = appendToken(out, v)
		}
	}
	if err := checkSubject(out[start:]); err != nil {
		return dst, err
	}
	return out, nil
}

// partition is the event's. What the message has of the event decides, so that its consumers agree.
func partition(ev *outbox.Event, n int) uint32 {
	id := ""
	if len(ev.Values[outbox.AggregateID]) == 0 {
		ref := ev.Ref()
		id = string(ref.AppendEventID(nil))
	}
	tenant, kind := string(ev.Values[outbox.TenantID]), string(ev.Values[outbox.AggregateType])
	return outbox.PartitionHash(tenant, kind, string(ev.Values[outbox.AggregateID]), id) % uint32(n)
}

func checkValue(f outbox.Field, v []byte) error {
	switch {
	case len(v) == 0:
		return rowErrorf(outbox.RowSubject, "%s is NULL or empty, and the subject needs it", f)
	case len(v) > maxSubject:
		return rowErrorf(outbox.RowSubject, "%s has %d bytes, a subject at most %d", f, len(v), maxSubject)
	case f == outbox.EventType && !validTokens(v):
		return rowErrorf(outbox.RowSubject,
			"event_type %s: want printable ASCII without spaces, * and >, and no empty token",
			excerpt(v))
	}
	return nil
}

// validTokens reports whether v can stand in a subject as it is. The server
// would store wildcards and control bytes without complaint.
func validTokens(v []byte) bool {
	last := byte('.')
	for _, c := range v {
		if c <= ' ' || c >= 0x7F || c == '*' || c == '>' || c == '.' && last == '.' {
			return false
		}
		last = c
	}
	return last != '.'
}

func checkSubject(s []byte) error {
	switch {
	case len(s) > maxSubject:
		return rowErrorf(outbox.RowSubject, "the subject has %d bytes, the limit is %d", len(s), maxSubject)
	case s[0] == '$' || isFirstToken(s, "_INBOX"):
		return rowErrorf(outbox.RowSubject, "subject %s begins with a token reserved by NATS", excerpt(s))
	}
	return nil
}

func isFirstToken(s []byte, token string) bool {
	return len(s) >= len(token) && string(s[:len(token)]) == token &&
		(len(s) == len(token) || s[len(token)] == '.')
}

const upperHex = "0123456789ABCDEF"

func appendToken(dst, v []byte) []byte {
	for _, c := range v {
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-' {
			dst = append(dst, c)
		} else {
			dst = append(dst, '%', upperHex[c>>4], upperHex[c&0xF])
		}
	}
	return dst
}
