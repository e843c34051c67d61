package publish

import (
	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
)

// header is an index into the names of every header that the relay can send.
type header uint8

const (
	hMsgID header = iota
	hPosition
	hExpectedLast
	hVia
	hCommit
	hReplayOf
	hID
	hType
	hSubject
	hTime
	hTenantID
	hAggregateType
	hAggregateID
	hAggregateVersion
	hEventVersion
	hTraceID
	hTraceparent
	hStream
	hSpecVersion
	hSource
	hContentType
	numHeaders
)

var headerNames = [numHeaders]string{
	hMsgID:            nats.MsgIdHdr,
	hPosition:         jetstream.PositionHeader,
	hExpectedLast:     nats.ExpectedLastSeqHdr,
	hVia:              jetstream.ViaHeader,
	hCommit:           jetstream.CommitHeader,
	hReplayOf:         jetstream.ReplayOfHeader,
	hID:               "ce-id",
	hType:             "ce-type",
	hSubject:          "ce-subject",
	hTime:             "ce-time",
	hTenantID:         "ce-tenantid",
	hAggregateType:    "ce-aggregatetype",
	hAggregateID:      "ce-aggregateid",
	hAggregateVersion: "ce-aggregateversion",
	hEventVersion:     "ce-eventversion",
	hTraceID:          "ce-traceid",
	hTraceparent:      "traceparent",
	hStream:           nats.ExpectedStreamHdr,
	hSpecVersion:      "ce-specversion",
	hSource:           "ce-source",
	hContentType:      "content-type",
}

// headerPrefixes are what stands before the headers' values.
var headerPrefixes = func() (all [numHeaders]string) {
	for id, name := range headerNames {
		all[id] = name + ": "
	}
	return all
}()

// headerBegin opens every header block, headerEnd closes it.
const (
	headerBegin = "NATS/1.0\r\n"
	headerEnd   = "\r\n"
)

// headers is the header block of a message as it goes over the wire: what is the
// same in every message is written once, the rest for each message.
type headers struct {
	block []byte
	fixed int // length of what stays
	start int // of the header that is being written
	value int // of its value
}

func newHeaders() *headers {
	return &headers{block: []byte(headerBegin), fixed: len(headerBegin)}
}

// fix adds a header to every message.
func (h *headers) fix(id header, value string) {
	h.put(id, value)
	h.fixed = len(h.block)
}

// begin starts a message.
func (h *headers) begin() { h.block = h.block[:h.fixed] }

// open starts a header: what is appended to block from then on is its value.
func (h *headers) open(id header) {
	h.start = len(h.block)
	h.block = append(h.block, headerPrefixes[id]...)
	h.value = len(h.block)
}

// close ends it. A header without a value is absent.
func (h *headers) close() {
	if len(h.block) == h.value {
		h.block = h.block[:h.start]
		return
	}
	h.block = append(h.block, "\r\n"...)
}

func (h *headers) put(id header, value string) {
	h.open(id)
	h.block = append(h.block, value...)
	h.close()
}

// percent is put for a value that may be anything.
func (h *headers) percent(id header, value []byte) {
	h.open(id)
	h.block = appendPercent(h.block, value)
	h.close()
}

// end completes the block.
func (h *headers) end() { h.block = append(h.block, headerEnd...) }

// appendPercent encodes an attribute's value as the CloudEvents binding for NATS
// says. It is also what keeps a row from ending a header and beginning another.
func appendPercent[T string | []byte](dst []byte, v T) []byte {
	done := 0
	for i := range len(v) {
		if c := v[i]; c <= ' ' || c >= 0x7F || c == '"' || c == '%' {
			dst = append(dst, v[done:i]...)
			dst = append(dst, '%', upperHex[c>>4], upperHex[c&0xF])
			done = i + 1
		}
	}
	return append(dst, v[done:]...)
}

// IsTraceparent reports whether v is a traceparent header of W3C Trace Context.
func IsTraceparent(v []byte) bool {
	if len(v) != 55 || v[2] != '-' || v[35] != '-' || v[52] != '-' {
		return false
	}
	version, trace, parent, flags := v[:2], v[3:35], v[36:52], v[53:]
	return lowerHex(version) && lowerHex(trace) && lowerHex(parent) && lowerHex(flags) &&
		string(version) != "ff" && !zeros(trace) && !zeros(parent)
}

func lowerHex(v []byte) bool {
	for _, c := range v {
		if (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}

func zeros(v []byte) bool {
	for _, c := range v {
		if c != '0' {
			return false
		}
	}
	return true
}
