package jetstream

import (
	"bytes"
	"hash/maphash"
	"slices"

	"github.com/nats-io/nats.go"
)

// Sum tells a message from others with the same id: its subject and its headers, as hashes. Sums of one
// process can be compared. Not in it are the headers that say when and how a message was published, those
// that a server adds, and the content type, which belongs to the body.
type Sum struct{ Subject, Headers uint64 }

var unsummed = []string{
	nats.ExpectedStreamHdr, nats.ExpectedLastSeqHdr,
	"Nats-Batch-Id", "Nats-Batch-Sequence", "Nats-Batch-Commit",
	PositionHeader, ViaHeader, CommitHeader, contentTypeHeader, nats.MsgSize, "Nats-Stream-Source",
}

// sumSeed is not known to those who choose what is summed.
var sumSeed = maphash.MakeSeed()

// SumOf is the sum of a message with these headers.
func SumOf(subject string, h nats.Header) (s Sum) {
	s.Subject = maphash.String(sumSeed, subject)
	for name, values := range h {
		for _, v := range values {
			s.add(name, v)
		}
	}
	return s
}

// SumOfBlock is the sum of a message whose headers are still as they go over the wire.
func SumOfBlock(subject string, block []byte) (s Sum) {
	s.Subject = maphash.String(sumSeed, subject)
	_, block, _ = bytes.Cut(block, []byte("\r\n")) // the version
	for line := range bytes.SplitSeq(block, []byte("\r\n")) {
		if name, value, ok := bytes.Cut(line, []byte(": ")); ok {
			s.add(string(name), string(value))
		}
	}
	return s
}

// add adds a header, in whatever order they come.
func (s *Sum) add(name, value string) {
	if slices.Contains(unsummed, name) {
		return
	}
	var h maphash.Hash
	h.SetSeed(sumSeed)
	_, _ = h.WriteString(name)
	_, _ = h.WriteString(": ")
	_, _ = h.WriteString(value)
	s.Headers += h.Sum64()
}
