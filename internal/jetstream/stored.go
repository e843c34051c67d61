package jetstream

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// A message in CloudEvents' structured mode has structuredType as its content type. Its
// data is a string where the payload is text that is not JSON.
const (
	contentTypeHeader = "content-type"
	structuredType    = "application/cloudevents+json"
	plainTextType     = "text/plain;charset=utf-8"
)

// Space is what may stand around a JSON value.
const Space = " \t\n\r"

// StoredMessage is a whole message.
type StoredMessage struct {
	Seq     uint64
	At      time.Time // when it was stored
	Subject string
	ID      string
	// Position is the value of its header.
	Position string
	Header   nats.Header
	Body     []byte
}

// Sum is [SumOf] the message.
func (m *StoredMessage) Sum() Sum { return SumOf(m.Subject, m.Header) }

// Message reads one message from the stream's leader. It returns ErrMessageGone where
// there is no such message.
func (s *Stream) Message(ctx context.Context, seq uint64) (m StoredMessage, err error) {
	reply, err := s.getMessage(ctx, fmt.Appendf(nil, `{"seq":%d}`, seq))
	if err == nil {
		m, err = reply.stored()
	}
	if err != nil {
		return m, fmt.Errorf("read message %d: %w", seq, err)
	}
	return m, nil
}

// Last reads the stream's last message from its leader. It returns ErrMessageGone where there is none.
func (s *Stream) Last(ctx context.Context) (m StoredMessage, err error) {
	reply, err := s.getMessage(ctx, []byte(`{"last_by_subj":">"}`))
	if err == nil {
		m, err = reply.stored()
	}
	if err != nil {
		return m, fmt.Errorf("read the last message: %w", err)
	}
	return m, nil
}

// Next asks the stream's leader for the sequence of the first message from one on whose subject fits the
// filter; empty is every subject. It returns ErrMessageGone where there is none.
func (s *Stream) Next(ctx context.Context, from uint64, filter string) (uint64, error) {
	m, err := s.nextMessage(ctx, from, filter)
	if err != nil {
		return 0, fmt.Errorf("find a message from %d on: %w", from, err)
	}
	return m.Seq, nil
}

func (m *gotMessage) stored() (StoredMessage, error) {
	h, err := m.headers()
	return StoredMessage{
		m.Seq, m.Time, m.Subject, h.Get(nats.MsgIdHdr), h.Get(PositionHeader), h, m.Data,
	}, err
}

// Payload is the payload of a message in either format, without white space (blank, tab, LF, CR) around it:
// an envelope does not tell that from its own.
func (m *StoredMessage) Payload() []byte { return bytes.Trim(m.payload(), Space) }

func (m *StoredMessage) payload() []byte {
	if !strings.HasPrefix(m.Header.Get(contentTypeHeader), structuredType) {
		return m.Body
	}
	var e struct {
		Type   string `json:"datacontenttype"`
		Data   json.RawMessage
		Base64 []byte `json:"data_base64"`
	}
	if json.Unmarshal(m.Body, &e) != nil {
		return m.Body
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
