package publish

import (
	"github.com/nats-io/nats.go"
)

// ViaHeader says who published a message where it was not the WAL's stream.
const ViaHeader = "Walpost-Via"

// ViaPoll is its value in messages of rows that were read from their table.
const ViaPoll = "poll"

// header is an index into the names of every header that the relay can send.
type header uint8

const (
	hMsgID header = iota
	hPosition
	hExpectedLast
	hVia
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
	// The headers from here on have the same value in every message.
	hStream
	hSpecVersion
	hSource
	hDataContentType
	hContentType
	numHeaders

	firstFixed = hStream
)

var headerNames = [numHeaders]string{
	hMsgID:            nats.MsgIdHdr,
	hPosition:         PositionHeader,
	hExpectedLast:     nats.ExpectedLastSeqHdr,
	hVia:              ViaHeader,
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
	hDataContentType:  "ce-datacontenttype",
	hContentType:      "content-type",
}

// maxHeader is the server's limit on a message's encoded headers, in bytes.
const maxHeader = 65535

// headers is a nats.Header that is filled anew for every message: the values of
// one message are written one after the other into text, and become strings in
// a single allocation.
type headers struct {
	header nats.Header
	values [numHeaders][1]string
	in     [numHeaders]bool // is in header
	text   []byte
	ends   [firstFixed]int // where each value ends in text; never decreasing
}

func newHeaders() *headers { return &headers{header: make(nats.Header, numHeaders)} }

// begin starts a message. Its headers are then ended in ascending order.
func (h *headers) begin() {
	h.text = h.text[:0]
	h.ends = [firstFixed]int{}
}

// end makes what was appended to text since the last end the value of a header.
// A header without a value is absent.
func (h *headers) end(id header) { h.ends[id] = len(h.text) }

// finish puts the values into the map.
func (h *headers) finish() {
	all := string(h.text)
	start := 0
	for id := range firstFixed {
		end := max(h.ends[id], start)
		h.put(id, all[start:end])
		start = end
	}
}

func (h *headers) put(id header, value string) {
	h.values[id][0] = value
	switch present := value != ""; {
	case present == h.in[id]:
	case present:
		h.header[headerNames[id]] = h.values[id][:]
		h.in[id] = true
	default:
		delete(h.header, headerNames[id])
		h.in[id] = false
	}
}

// size is the number of bytes that nats.go encodes the headers into.
func (h *headers) size() int {
	n := len("NATS/1.0\r\n\r\n")
	for id := range numHeaders {
		if h.in[id] {
			n += len(headerNames[id]) + len(": \r\n") + len(h.values[id][0])
		}
	}
	return n
}

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

// isTraceparent reports whether v is a traceparent header of W3C Trace Context.
func isTraceparent(v []byte) bool {
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
