package publish

import (
	"errors"
	"slices"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// batched reports whether the lane stages what it sends.
func (l *Lane) batched() bool {
	return l.batches.kind == jetstream.BatchFast || l.batches.kind == jetstream.BatchAtomic
}

// mostInUnit is how many messages and bytes a unit has at most.
func (l *Lane) mostInUnit() (messages, bytes int) {
	messages, bytes = max(1, l.cfg.Window/2), l.cfg.WindowBytes/2
	if l.batches.kind == jetstream.BatchFast {
		return max(messages, l.cfg.Window-maxStage), bytes
	}
	return min(messages, maxAtomic), bytes
}

// mostStaged is how many may be staged while one is under way: all of the next atomic
// batch, which is written as a whole.
func (l *Lane) mostStaged() (messages, bytes int) {
	messages, bytes = l.mostInUnit()
	if l.batches.kind == jetstream.BatchFast {
		messages, bytes = min(messages, maxStage), min(bytes, maxStageBytes)
	}
	if l.batches.singly > 0 {
		messages = min(messages, 64)
	}
	return messages, bytes
}

// stage keeps a message for its unit. The caller has found a place for it.
func (l *Lane) stage(subject string, index uint64, commit outbox.LSN, header, body []byte, alone bool) {
	b := &l.batches
	if len(b.staged) == 0 {
		b.first = index
	}
	b.arena = append(b.arena, header...)
	s := staged{subject: subject, header: len(b.arena), alone: alone, joined: len(b.staged) > 0 && commit != 0 && commit == b.commit}
	b.commit = commit
	b.arena = append(b.arena, body...)
	s.body = len(b.arena)
	b.staged = append(b.staged, s)
}

// stageIsFull reports whether what is staged has to go before more is. The caller
// holds mu.
func (l *Lane) stageIsFull() bool {
	b := &l.batches
	messages, bytes := l.mostStaged()
	return len(b.staged) >= messages || len(b.arena) > bytes || !l.underWay() && b.isPart()
}

// isPart reports whether enough is staged for it to be written as a part of a fast batch.
func (b *batches) isPart() bool {
	return b.kind == jetstream.BatchFast && b.singly == 0 && len(b.staged) > 1 && (len(b.staged) >= partMessages || len(b.arena) >= partBytes)
}

// underWay reports whether a unit waits for its PubAck. The caller holds mu.
func (l *Lane) underWay() bool { return l.ring.low < l.batches.written }

// publishStaged publishes the next unit, or a part of it, and says whether there was any,
// unless one is under way: then what is staged goes when that has its PubAck. More is set
// where more is to come at once: then a fast batch goes on, and an atomic one may end in
// the midst of a transaction.
func (l *Lane) publishStaged(more bool) (bool, error) {
	b := &l.batches
	l.mu.Lock()
	n := len(b.staged)
	if b.kind == jetstream.BatchAtomic && !(more && b.whole == 0 && l.ring.inflight == n) {
		n = b.whole
	}
	if n == 0 {
		l.mu.Unlock()
		return false, nil
	}
	messages, bytes := l.mostInUnit()
	unit, goesOn := l.unitOf(n, more && b.isPart() && l.ring.inflight+partMessages <= messages && l.ring.bytes+partBytes <= bytes)
	wait := l.underWay()
	if wait {
		b.due = b.due || !more // with more the sender comes again itself
	} else {
		b.due = unit < n && !goesOn
	}
	if l.err != nil && !errors.Is(l.err, errDrained) {
		wait = true // in vain
	}
	l.mu.Unlock()
	if wait {
		return false, nil
	}
	b.singly -= min(b.singly, unit)
	return true, l.publishUnit(unit, goesOn)
}

// unitOf is how many of the first n staged messages go together, and whether the batch
// that they are of goes on after them: then one message stays, to be the last one.
func (l *Lane) unitOf(n int, goesOn bool) (int, bool) {
	b := &l.batches
	if b.singly > 0 {
		return 1, false
	}
	if b.kind == jetstream.BatchAtomic && n > 1 && n < atomicLeast && !b.staged[1].joined {
		return 1, false
	}
	for i, s := range b.staged[:n] {
		if s.alone {
			return max(i, 1), false
		}
	}
	if goesOn {
		return n - 1, true
	}
	return n, false
}

// publishUnit writes the first n staged messages. A unit that goes on is not complete.
func (l *Lane) publishUnit(n int, goesOn bool) error {
	b := &l.batches
	if b.open == 0 {
		b.unit = b.first
	}
	total := b.open + n
	batch := goesOn || total > 1
	if batch {
		l.mu.Lock()
		err := l.announce(total)
		l.mu.Unlock()
		if err != nil {
			return err
		}
	}
	start := 0
	for i, s := range b.staged[:n] {
		if i%64 == 63 { // large ones take their time
			if err := l.Err(); err != nil && !errors.Is(err, errDrained) {
				return err
			}
		}
		last := i == n-1 && !goesOn
		header, more := b.arena[start:s.header], []byte(nil)
		if !s.alone {
			header = header[:len(header)-len(headerEnd)]
			more = l.unitHeader(b.open+i, batch, last)
		}
		if err := l.wire.publish(s.subject, l.unitReply(b.open+i, batch, last), header, more, b.arena[s.header:s.body]); err != nil {
			return err
		}
		start = s.body
	}
	if b.open = total; !goesOn {
		l.complete(total)
	} else {
		l.lingering = false
		l.letLinger() // from here on
	}
	rest := copy(b.arena, b.arena[start:])
	b.arena = b.arena[:rest]
	b.staged = slices.Delete(b.staged, 0, n)
	for i := range b.staged {
		b.staged[i].header -= start
		b.staged[i].body -= start
	}
	b.first += uint64(n)
	b.whole = max(0, b.whole-n)
	return nil
}

// announce notes how many messages of the batch were written, before they are: whatever
// makes it fail concerns all of them. The caller holds mu.
func (l *Lane) announce(total int) error {
	b := &l.batches
	if b.open == 0 {
		b.sent = append(b.sent, sentBatch{b.unit, total})
		return nil
	}
	i := slices.IndexFunc(b.sent, func(x sentBatch) bool { return x.first == b.unit })
	if i < 0 { // it has failed, or has got a PubAck that it was not to have yet
		return errors.Join(l.err, errBatch)
	}
	b.sent[i].n = total
	return nil
}

// complete notes that a unit is under way, in full.
func (l *Lane) complete(total int) {
	b := &l.batches
	l.mu.Lock()
	defer l.mu.Unlock()
	b.written, b.open = b.unit+uint64(total), 0
	for i := b.unit; i < b.written; i++ {
		if s := l.ring.at(i); s.state == sent {
			s.sentAt = l.ticks // the time for the PubAck begins when all is written
		}
	}
}

// unitHeader is the rest of a header block, which only the unit knows. Of an atomic
// batch only the first message may expect a sequence. The stream's name is in the first
// message only: another stream, if one should get a later one, knows of no such batch and
// refuses it, and the header would cost NATS 4 % of its time.
func (l *Lane) unitHeader(i int, batch, last bool) []byte {
	b := &l.batches
	h := l.header[:0]
	atomic := b.kind == jetstream.BatchAtomic && batch
	if i == 0 {
		h = append(h, nats.ExpectedStreamHdr+": "...)
		h = append(h, l.cfg.Stream.Name()...)
		h = append(h, "\r\n"...)
	}
	if !atomic || i == 0 {
		h = append(h, nats.ExpectedLastSeqHdr+": "...)
		h = strconv.AppendUint(h, l.cfg.Base+b.unit+uint64(i), 10)
		h = append(h, "\r\n"...)
	}
	if atomic {
		h = append(h, batchIDHeader+": "...)
		h = l.appendBatchID(h)
		h = append(h, "\r\n"+batchSequenceHeader+": "...)
		h = strconv.AppendInt(h, int64(i+1), 10)
		h = append(h, "\r\n"...)
		if last {
			h = append(h, batchCommitHeader+": 1\r\n"...)
		}
	}
	h = append(h, headerEnd...)
	l.header = h
	return h
}

const (
	batchIDHeader       = "Nats-Batch-Id"
	batchSequenceHeader = "Nats-Batch-Sequence"
	batchCommitHeader   = "Nats-Batch-Commit"
	// batchHeaders is what they and what is expected of the stream take at most, in bytes,
	// the stream's name aside.
	batchHeaders = 200
)

func (l *Lane) appendBatchID(dst []byte) []byte {
	dst = append(dst, l.batches.id...)
	dst = append(dst, '-')
	return strconv.AppendUint(dst, l.batches.unit, 36)
}

// unitReply is where the reply to a message of a unit goes. Of an atomic batch only
// the last one has any. The state of a fast one travels in it: its id, an
// acknowledgement every so many messages, of which none is needed, to fail at a gap, the
// message's number, and what it does: 0 begins, 1 goes on, 2 is the last.
func (l *Lane) unitReply(i int, batch, last bool) []byte {
	b := &l.batches
	r := append(l.reply[:0], l.inbox...)
	switch {
	case batch && b.kind == jetstream.BatchFast:
		r = l.appendBatchID(r)
		r = append(r, ".500.fail."...)
		r = strconv.AppendInt(r, int64(i+1), 10)
		op := byte('1')
		if i == 0 {
			op = '0'
		} else if last {
			op = '2'
		}
		r = append(r, '.', op)
		r = append(r, ".$FI"...)
	case last:
		r = strconv.AppendUint(r, b.unit+uint64(i), 36)
	default:
		return nil
	}
	l.reply = r
	return r
}
