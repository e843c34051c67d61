package publish

import (
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
)

const (
	batchIDHeader       = "Nats-Batch-Id"
	batchSequenceHeader = "Nats-Batch-Sequence"
	batchCommitHeader   = "Nats-Batch-Commit"
	// batchHeaders is what they and what is expected of the stream take at most, in bytes,
	// the stream's name aside.
	batchHeaders = 200
)

// coder writes what a message says of its unit. It is the sender's.
type coder struct {
	kind   jetstream.Batching
	inbox  string
	stream string
	id     string // what the ids of the publisher's batches begin with
	base   uint64 // the stream's last sequence before the publisher

	headerBlock, replySubject []byte // of the message that is being sent
}

// place is a message's place in its unit.
type place struct {
	*unit
	n    int // 0 for the first one
	last bool
}

// header is the rest of a header block, which only the unit knows. Of an atomic
// batch only the first message may expect a sequence. The stream's name is in the first
// message only: another stream, if one should get a later one, knows of no such batch and
// refuses it, and the header would cost NATS 4 % of its time.
func (c *coder) header(at place) []byte {
	h := c.headerBlock[:0]
	atomic := c.kind == jetstream.BatchAtomic && at.batch
	if at.n == 0 {
		h = append(h, nats.ExpectedStreamHdr+": "...)
		h = append(h, c.stream...)
		h = append(h, "\r\n"...)
	}
	if !atomic || at.n == 0 {
		h = append(h, nats.ExpectedLastSeqHdr+": "...)
		h = strconv.AppendUint(h, c.base+at.first+uint64(at.n), 10)
		h = append(h, "\r\n"...)
	}
	if atomic {
		h = append(h, batchIDHeader+": "...)
		h = c.appendID(h, at.first)
		h = append(h, "\r\n"+batchSequenceHeader+": "...)
		h = strconv.AppendInt(h, int64(at.n+1), 10)
		h = append(h, "\r\n"...)
		if at.last {
			h = append(h, batchCommitHeader+": 1\r\n"...)
		}
	}
	h = append(h, headerEnd...)
	c.headerBlock = h
	return h
}

func (c *coder) appendID(dst []byte, first uint64) []byte {
	dst = append(dst, c.id...)
	dst = append(dst, '-')
	return strconv.AppendUint(dst, first, 36)
}

// reply is where the reply to a message of a unit goes. Of an atomic batch only
// the last one has any. The state of a fast one travels in it: its id, an
// acknowledgement every so many messages, of which none is needed, to fail at a gap, the
// message's number, and what it does: 0 begins, 1 goes on, 2 is the last.
func (c *coder) reply(at place) []byte {
	r := append(c.replySubject[:0], c.inbox...)
	switch {
	case at.batch && c.kind == jetstream.BatchFast:
		r = c.appendID(r, at.first)
		r = append(r, ".500.fail."...)
		r = strconv.AppendInt(r, int64(at.n+1), 10)
		op := byte('1')
		if at.n == 0 {
			op = '0'
		} else if at.last {
			op = '2'
		}
		r = append(r, '.', op)
		r = append(r, ".$FI"...)
	case at.last:
		r = strconv.AppendUint(r, at.first+uint64(at.n), 36)
	default:
		return nil
	}
	c.replySubject = r
	return r
}
