package publish

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"

	"github.com/nats-io/nats.go"
)

// pubAck says that the message is stored in Stream at Seq.
type pubAck struct {
	Stream string
	Seq    uint64
	// Count is how many messages a batch had; zero for a message by itself.
	Count uint64
	// Duplicate means that nothing was stored now: Seq is where a message with
	// this id was stored earlier, and may have been deleted since.
	Duplicate bool
}

// parseAck reads the reply to a publish into the stream. It fails with
// [ErrNoResponders], an [*ackError], or an error that wraps [errInvalidAck]
// where the reply is not a PubAck of that stream.
func parseAck(msg *nats.Msg, stream string) (pubAck, error) {
	if len(msg.Header) > 0 {
		if status := msg.Header.Get("Status"); status == "503" {
			return pubAck{}, ErrNoResponders
		} else if status != "" {
			return pubAck{}, fmt.Errorf("%w: status %.40q", errInvalidAck, status)
		}
	}
	ack, ok := parseUsualAck(msg.Data, stream)
	if ok {
		return ack, nil
	}
	return parseAnyAck(msg.Data, stream)
}

// parseUsualAck takes the forms that nats-server writes when all is well; ok is
// false for every other one, which then costs a real JSON parser.
func parseUsualAck(b []byte, stream string) (ack pubAck, ok bool) {
	b, ok = cutPrefix(b, `{"stream":"`)
	if !ok || len(b) <= len(stream) || string(b[:len(stream)]) != stream || !plainJSON(stream) {
		return ack, false
	}
	b, ok = cutPrefix(b[len(stream):], `"`)
	if !ok {
		return ack, false
	}
	if b, ok = skipDomain(b); !ok {
		return ack, false
	}
	if b, ok = cutPrefix(b, `,"seq":`); !ok {
		return ack, false
	}
	if ack.Seq, b, ok = leadingUint(b); !ok {
		return ack, false
	}
	if b, ok = skipDomain(b); !ok {
		return ack, false
	}
	if rest, dup := cutPrefix(b, `,"duplicate": true`); dup {
		ack.Duplicate, b = true, rest
	} else if rest, dup := cutPrefix(b, `,"duplicate":true`); dup {
		ack.Duplicate, b = true, rest
	}
	if rest, batch := cutPrefix(b, `,"batch":"`); batch {
		end := bytes.IndexByte(rest, '"')
		if end < 0 {
			return ack, false
		}
		if rest, ok = cutPrefix(rest[end:], `","count":`); !ok {
			return ack, false
		}
		if ack.Count, b, ok = leadingUint(rest); !ok {
			return ack, false
		}
	}
	ack.Stream = stream
	return ack, string(b) == "}"
}

func cutPrefix(b []byte, prefix string) ([]byte, bool) {
	if len(b) < len(prefix) || string(b[:len(prefix)]) != prefix {
		return b, false
	}
	return b[len(prefix):], true
}

func skipDomain(b []byte) ([]byte, bool) {
	rest, ok := cutPrefix(b, `,"domain":"`)
	if !ok {
		return b, true
	}
	end := bytes.IndexByte(rest, '"')
	if end < 0 || !plainJSON(string(rest[:end])) {
		return b, false
	}
	return rest[end+1:], true
}

// plainJSON reports whether s stands for itself between JSON's quotes.
func plainJSON(s string) bool {
	for i := range len(s) {
		if s[i] < ' ' || s[i] >= 0x7F || s[i] == '"' || s[i] == '\\' {
			return false
		}
	}
	return true
}

// leadingUint reads a positive JSON integer.
func leadingUint(b []byte) (v uint64, rest []byte, ok bool) {
	i := 0
	for i < len(b) && b[i] >= '0' && b[i] <= '9' {
		d := uint64(b[i] - '0')
		if v > (math.MaxUint64-d)/10 {
			return 0, b, false
		}
		v = v*10 + d
		i++
	}
	return v, b[i:], i > 0 && b[0] != '0'
}

type ackReply struct {
	Error *struct {
		Code        int    `json:"code"`
		ErrCode     int    `json:"err_code"`
		Description string `json:"description"`
	} `json:"error"`
	Stream    string `json:"stream"`
	Seq       uint64 `json:"seq"`
	Duplicate bool   `json:"duplicate"`
	Count     uint64 `json:"count"`
}

func parseAnyAck(b []byte, stream string) (pubAck, error) {
	var r ackReply
	if err := json.Unmarshal(b, &r); err != nil {
		return pubAck{}, fmt.Errorf("%w: %s", errInvalidAck, excerpt(b))
	}
	switch {
	case r.Error != nil:
		e := r.Error
		return pubAck{}, &ackError{Code: e.Code, ErrCode: e.ErrCode, Description: e.Description}
	case r.Stream == "" || r.Seq == 0:
		return pubAck{}, fmt.Errorf("%w: %s", errInvalidAck, excerpt(b))
	case r.Stream != stream:
		return pubAck{}, fmt.Errorf("%w: from stream %.80q, want %q", errInvalidAck, r.Stream, stream)
	}
	return pubAck{Stream: stream, Seq: r.Seq, Duplicate: r.Duplicate, Count: r.Count}, nil
}
