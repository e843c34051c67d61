package jetstream

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/nats-io/nats.go"
)

// A message in CloudEvents' structured mode has structuredType as its content type. Its
// data is a string where the payload is text that is not JSON.
const (
	contentTypeHeader = "content-type"
	structuredType    = "application/cloudevents+json"
	plainTextType     = "text/plain;charset=utf-8"
)

// jsonSpace is what may stand around a JSON value: an envelope does not tell it from the payload's own.
const jsonSpace = " \t\n\r"

// StoredMessage is a message's id and what tells its payload from another one.
type StoredMessage struct {
	ID string
	// Sum is the SHA-256 of the payload without white space (blank, tab, LF, CR) around it.
	Sum [sha256.Size]byte
}

// Message reads one message from the stream's leader. It returns ErrMessageGone where
// there is no such message.
func (s *Stream) Message(ctx context.Context, seq uint64) (m StoredMessage, err error) {
	reply, err := s.getMessage(ctx, fmt.Appendf(nil, `{"seq":%d}`, seq))
	if err != nil {
		return m, fmt.Errorf("read message %d: %w", seq, err)
	}
	msg := &nats.Msg{Data: reply.Data}
	if msg.Header, err = reply.headers(); err != nil {
		return m, fmt.Errorf("read message %d: %w", seq, err)
	}
	sum := sha256.Sum256(bytes.Trim(payloadOf(msg), jsonSpace))
	return StoredMessage{msg.Header.Get(nats.MsgIdHdr), sum}, nil
}

// payloadOf takes the payload out of a message in either format.
func payloadOf(msg *nats.Msg) []byte {
	if !strings.HasPrefix(msg.Header.Get(contentTypeHeader), structuredType) {
		return msg.Data
	}
	var e struct {
		Type   string `json:"datacontenttype"`
		Data   json.RawMessage
		Base64 []byte `json:"data_base64"`
	}
	if json.Unmarshal(msg.Data, &e) != nil {
		return msg.Data
	}
	var text string
	switch {
	case e.Data == nil:
		return e.Base64
	case e.Type == plainTextType && json.Unmarshal(e.Data, &text) == nil:
		return []byte(text)
	}
	return e.Data
}
