package publish

import (
	"errors"
	"fmt"
	"strings"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
)

func rowErrorf(class, format string, args ...any) *outbox.RowError {
	return &outbox.RowError{Class: class, Reason: fmt.Sprintf(format, args...)}
}

// excerpt quotes hostile bytes for a message, cut to a readable length.
func excerpt(b []byte) string {
	const most = 64
	if len(b) > most {
		return fmt.Sprintf("%+q... (%d bytes)", b[:most], len(b))
	}
	return fmt.Sprintf("%+q", b)
}

// Class says what a failure means for the publisher.
type Class uint8

const (
	// ClassUnknown: the message may be stored or not; only the stream knows.
	ClassUnknown Class = iota
	// ClassRow: this very message was refused for what it is.
	ClassRow
	// ClassChain: the stream's last sequence is not what the publisher believed.
	ClassChain
	// ClassTransient: the server or the stream cannot take messages now.
	ClassTransient
	// ClassConfig: nothing will be taken until somebody changes a setting.
	ClassConfig
)

func (c Class) String() string {
	switch c {
	case ClassRow:
		return "row"
	case ClassChain:
		return "chain"
	case ClassTransient:
		return "transient"
	case ClassConfig:
		return "config"
	}
	return "unknown"
}

// ackError is JetStream's refusal of a message: it was not stored.
type ackError struct {
	Code        int    // like an HTTP status
	ErrCode     int    // JetStream's own, 10000 and up
	Description string // the server's words
}

func (e *ackError) Error() string {
	return fmt.Sprintf("JetStream refused the message: %s (%d)", e.Description, e.ErrCode)
}

// Class is [classify] of the error's codes.
func (e *ackError) Class() Class { return classify(e.Code, e.ErrCode, e.Description) }

// Row is the error as the row's own; nil where it is not.
func (e *ackError) Row() *outbox.RowError {
	if e.Class() != ClassRow {
		return nil
	}
	if e.ErrCode == errHeaderTooLarge {
		return rowErrorf(outbox.RowHeaders, "%s (%d)", e.Description, e.ErrCode)
	}
	return rowErrorf(outbox.RowSize, "%s (%d)", e.Description, e.ErrCode)
}

// ErrNoResponders: no stream listens on the subject, or it has no leader now.
// Which of the two it is STREAM.INFO tells. The message was not stored.
var ErrNoResponders = hint.Errorf(
	"have the stream cover the subject, and look for its leader: `walpost doctor`",
	"no stream took the message: no responders")

// errInvalidAck: something that is not the relay's stream answered. The message
// may be stored all the same.
var errInvalidAck = errors.New("invalid PubAck")

// ClassOf is the class of any error that a publish can end in.
func ClassOf(err error) Class {
	var row *outbox.RowError
	var ack *ackError
	switch {
	case errors.As(err, &row):
		return ClassRow
	case errors.As(err, &ack):
		return ack.Class()
	case errors.Is(err, ErrNoResponders):
		return ClassTransient
	}
	return ClassUnknown
}

const (
	errMessageTooLarge   = 10054
	errStreamMismatch    = 10060
	errWrongLastSequence = 10071
	errStoreFailed       = 10077
	errHeaderTooLarge    = 10097
	errSealed            = 10109
	errWrongLastConstant = 10164

	errBatchIncomplete = 10176 // by a change of the leader, too
	errBatchDuplicate  = 10201
	errBatchUnknown    = 10208
)

// batchRefusals are the answers to batches that the next ones would get, too. 10174 and 10205:
// switched off; 10175, 10177, 10179, 10200, 10206 and 10207: the server reads batches
// otherwise; 10199: it allows smaller ones only. 10210 and 10211 pass: too many are open. The
// relay does not see 10210, because only the last message of an atomic batch has a reply: it
// gets 10176.
var batchRefusals = []int{10174, 10175, 10177, 10179, 10199, 10200, 10205, 10206, 10207, 10210, 10211}

// classify names the class of a JetStream error in the reply to a publish.
//
// Only the three size errors are the row's own: subject, headers and body are
// all that a row can influence, and the envelope leaves nothing else to chance.
// An unknown code is never the row's, because a parked row loses an attempt: a
// 4xx is a setting to be changed, anything else passes.
func classify(code, errCode int, description string) Class {
	switch errCode {
	case errMessageTooLarge, errHeaderTooLarge:
		return ClassRow
	case errStoreFailed:
		if strings.Contains(description, "too large") {
			return ClassRow
		}
		return ClassTransient // full: discard new
	case errWrongLastSequence, errWrongLastConstant:
		return ClassChain
	case 10002, errBatchIncomplete, errBatchUnknown:
		return ClassTransient // a quota, or a batch that has gone, despite their code 400
	case errStreamMismatch, errSealed, 10039, 10076: // the last two: JetStream is off
		return ClassConfig
	}
	if code >= 400 && code < 500 && code != 408 && code != 409 && code != 429 {
		return ClassConfig
	}
	return ClassTransient
}
