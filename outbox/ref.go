package outbox

import (
	"cmp"
	"strconv"
	"strings"
)

// Ref names one row's content: two rows that share an id (after TRUNCATE
// RESTART IDENTITY, a failover or a restore) have different hashes, and so has
// a row that was changed while it was pending. It can be a map key.
type Ref struct {
	Table *Table
	ID    string
	Hash  uint64 // UnknownHash where a value was omitted
}

// AppendEventID appends "<table>/<id>/<hash>", which is unique in its source.
func (r Ref) AppendEventID(dst []byte) []byte {
	dst = append(r.Table.appendEscaped(dst), '/')
	dst = appendEscaped(dst, r.ID)
	dst = append(dst, '/')
	return appendHash(dst, r.Hash)
}

// appendEscaped appends the outbox's name. It is called for each row, and makes no string.
func (t *Table) appendEscaped(dst []byte) []byte {
	if name := cmp.Or(t.Known, t.Given); name != "" {
		return appendEscaped(dst, name)
	}
	return appendEscaped(append(appendEscaped(dst, t.Schema), '.'), t.Name)
}

// replayMark and the number of a request end the ids of messages that were published again.
const replayMark = "replay-"

// AppendReplay makes an event id, or a message id, that of the event's replay: "<id>/replay-<request>".
func AppendReplay(id []byte, request int64) []byte {
	id = append(append(id, '/'), replayMark...)
	return strconv.AppendInt(id, request, 10)
}

// MessageID is the Nats-Msg-Id, "<source>/<table>/<id>/<hash>".
func (r Ref) MessageID(source string) string {
	dst := make([]byte, 0, 96)
	dst = append(dst, source...)
	dst = append(dst, '/')
	return string(r.AppendEventID(dst))
}

func (r Ref) String() string { return string(r.AppendEventID(nil)) }

func appendHash(dst []byte, h uint64) []byte {
	const digits = "0123456789abcdef"
	for shift := 60; shift >= 0; shift -= 4 {
		dst = append(dst, digits[h>>shift&0xF])
	}
	return dst
}

// appendEscaped percent-encodes what a header value or the id's own separators
// cannot carry.
func appendEscaped(dst []byte, s string) []byte {
	const digits = "0123456789ABCDEF"
	for i := range len(s) {
		c := s[i]
		if c <= ' ' || c >= 0x7F || c == '%' || c == '/' {
			dst = append(dst, '%', digits[c>>4], digits[c&0xF])
			continue
		}
		dst = append(dst, c)
	}
	return dst
}

func unescape(s string) (string, bool) {
	if !strings.Contains(s, "%") {
		return s, true
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] != '%' {
			b.WriteByte(s[i])
			continue
		}
		if i+2 >= len(s) {
			return "", false
		}
		v, err := strconv.ParseUint(s[i+1:i+3], 16, 8)
		if err != nil {
			return "", false
		}
		b.WriteByte(byte(v))
		i += 2
	}
	return b.String(), true
}

// MessageID is a Nats-Msg-Id taken apart.
type MessageID struct {
	Table  string // the outbox's name
	ID     string
	Hash   uint64
	Replay bool // published again on purpose: proves nothing about the first time
	// Request is the number of the replay's request; 0 where the id does not say it.
	Request int64
}

// String is the Nats-Msg-Id without its source: "<table>/<id>/<hash>", with a replay's end as [AppendReplay]
// makes it.
func (m MessageID) String() string {
	dst := append(appendEscaped(nil, m.Table), '/')
	dst = append(appendEscaped(dst, m.ID), '/')
	dst = appendHash(dst, m.Hash)
	if m.Replay {
		dst = AppendReplay(dst, m.Request)
	}
	return string(dst)
}

// MaxID is how many bytes the id of a row has at most. A start keeps the ids of thousands of messages, and
// anybody who may publish chooses those.
const MaxID = 4096

// ParseMessageID takes a Nats-Msg-Id apart; ok is false where it is not of this
// source, or longer than those of rows.
func ParseMessageID(source, s string) (m MessageID, ok bool) {
	rest, ok := strings.CutPrefix(s, source+"/")
	if !ok {
		return m, false
	}
	f := strings.Split(rest, "/")
	switch {
	case len(f) == 4 && strings.HasPrefix(f[3], replayMark):
		m.Replay = true
		m.Request, _ = strconv.ParseInt(f[3][len(replayMark):], 10, 64)
	case len(f) != 3:
		return m, false
	}
	if len(f[0]) > MaxID || len(f[1]) > 3*MaxID {
		return MessageID{}, false
	}
	table, ok1 := unescape(f[0])
	id, ok2 := unescape(f[1])
	h, err := strconv.ParseUint(f[2], 16, 64)
	// An id with UnknownHash names no row's content.
	if !ok1 || !ok2 || len(id) > MaxID || err != nil || len(f[2]) != 16 || h == UnknownHash {
		return m, false
	}
	m.Table, m.ID, m.Hash = table, id, h
	return m, true
}
