package publish

import (
	"errors"

	"github.com/walpost/walpost/internal/jetstream"
)

// errBatch means that a batch was not stored as it was sent. Only the stream knows
// what of it was.
var errBatch = errors.New("a batch was not stored as it was sent")

// unit is what a lane with batches has under way: one message, or one batch. While it is,
// the next one gathers (see [stage]). So nothing is stored behind something that was
// refused: expectations that are under way together are only numbers, and a message of
// somebody else's moves the sequence to where a later one of them fits.
//
// A fast batch is written as its messages come, in chunks, all but the newest: that is the
// last one as soon as nothing more comes, or the batch has become large. An atomic batch
// has to be complete before it is written.
//
//	state     what is written          the sender's step            a batch's reply
//	none      nothing                  grow: open, closing          -
//	open      all but the last         grow: open, closing          failed
//	closing   the last chunk, just now written: complete            none
//	complete  all of it                grow, behind the replies     none
//	cut       a write has failed       grow: an error               failed
//	failed    the lane has stopped     grow: an error               -
//
// A write that fails cuts what is open or closing. A reply is a PubAck for the whole batch,
// or what makes it fail. The unit of one message has its reply in the ring.
//
// The sender changes it under both locks of the lane, a reply changes state alone, under
// mu. So either lock is enough to read the other fields.
type unit struct {
	first uint64 // the index of its first message
	n     int    // so many messages of it were written, or are just now
	batch bool
	state unitState
}

type unitState uint8

const (
	unitNone unitState = iota
	unitOpen
	unitClosing
	unitComplete
	unitCut
	unitFailed
)

// grow notes n more messages before they are written: whatever makes the batch fail
// concerns all of them. The first of them has the index first where a unit begins.
func (u *unit) grow(first uint64, n int, goesOn bool) error {
	switch u.state {
	case unitCut, unitFailed: // or it has got a PubAck that it was not to have yet
		return errBatch
	case unitOpen:
		u.n += n
	default:
		u.first, u.n = first, n
	}
	u.batch = goesOn || u.n > 1
	if u.state = unitClosing; goesOn {
		u.state = unitOpen
	}
	return nil
}

// written notes that the last chunk was, and reports whether it still waits for a reply.
func (u *unit) written() bool {
	if u.state != unitClosing {
		return false
	}
	u.state = unitComplete
	return true
}

// cut notes that a write has failed: nothing is written again, and nothing behind it.
func (u *unit) cut() {
	if u.state == unitOpen || u.state == unitClosing {
		u.state = unitCut
	} else {
		u.state = unitFailed // its reply came before
	}
}

// replied ends a batch.
func (u *unit) replied() {
	if u.state == unitOpen || u.state == unitCut {
		u.state = unitFailed // the sender goes on with it, and has to notice
	} else {
		u.state = unitNone
	}
}

// waits reports whether it is a batch without a reply.
func (u *unit) waits() bool { return u.batch && u.state != unitNone && u.state != unitFailed }

// begins reports whether it is a batch without a reply that begins with a message.
func (u *unit) begins(first uint64) bool { return u.waits() && u.first == first }

// holds reports whether it is a batch without a reply that has a message.
func (u *unit) holds(index uint64) bool { return u.waits() && index >= u.first && index < u.end() }

// end is the index behind its last message.
func (u *unit) end() uint64 { return u.first + uint64(u.n) }

// underWay reports whether a unit was written and waits for its PubAck. The caller holds mu.
func (l *Lane) underWay() bool { return l.unit.state == unitComplete && l.ring.low < l.unit.end() }

// publishStaged publishes the next unit, or a chunk of it, and says whether there was any,
// unless one is under way: then what is staged goes when that has its PubAck. More is set
// where more is to come at once: then a fast batch goes on, and an atomic one may end in
// the midst of a transaction.
func (l *Lane) publishStaged(more bool) (bool, error) {
	g := &l.stage
	l.mu.Lock()
	ready := g.ready(more, l.ring.inflight)
	if ready == 0 {
		l.mu.Unlock()
		return false, nil
	}
	messages, bytes := g.mostInUnit()
	roomy := l.ring.inflight+chunkMessages <= messages && l.ring.bytes+chunkBytes <= bytes
	n, goesOn := g.next(ready, more && g.isChunk() && roomy)
	wait := l.underWay()
	if wait {
		l.due = l.due || !more // with more the sender comes again itself
	} else {
		l.due = n < ready && !goesOn
	}
	if l.err != nil && !errors.Is(l.err, errDrained) {
		wait = true // in vain
	}
	l.mu.Unlock()
	if wait {
		return false, nil
	}
	return true, l.publishUnit(n, goesOn)
}

// publishUnit writes the first n staged messages. A unit that goes on is not complete.
func (l *Lane) publishUnit(n int, goesOn bool) error {
	g, u := &l.stage, &l.unit
	l.mu.Lock()
	err := u.grow(g.first, n, goesOn)
	if err != nil {
		err = errors.Join(l.err, err)
	}
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if err := l.writeStaged(n, goesOn); err != nil {
		l.mu.Lock()
		u.cut()
		l.mu.Unlock()
		return err
	}
	if goesOn {
		l.lingering = false
		l.letLinger() // from here on
	} else {
		l.complete()
	}
	g.drop(n)
	return nil
}

// writeStaged writes the first n staged messages, which the unit has.
func (l *Lane) writeStaged(n int, goesOn bool) error {
	g, u := &l.stage, &l.unit
	start := 0
	for i, s := range g.messages[:n] {
		if i%64 == 63 { // large ones take their time
			if err := l.Err(); err != nil && !errors.Is(err, errDrained) {
				return err
			}
		}
		at := place{unit: u, n: u.n - n + i, last: i == n-1 && !goesOn}
		header, more := g.arena[start:s.header], []byte(nil)
		if !s.alone {
			header = header[:len(header)-len(headerEnd)]
			more = l.coder.header(at)
		}
		body := g.arena[s.header:s.body]
		if err := l.wire.publish(s.subject, l.coder.reply(at), header, more, body); err != nil {
			return err
		}
		start = s.body
	}
	return nil
}

// complete notes that a unit was written in full.
func (l *Lane) complete() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.unit.written() {
		return
	}
	for i := l.unit.first; i < l.unit.end(); i++ {
		if s := l.ring.at(i); s.state == sent {
			s.sentAt = l.ticks // the time for the PubAck begins when all is written
		}
	}
}

// forgetStaged drops the messages that were never written, and a batch that will never end.
func (l *Lane) forgetStaged() {
	g, u := &l.stage, &l.unit
	l.mu.Lock()
	defer l.mu.Unlock()
	if u.state == unitOpen || u.state == unitCut {
		l.onBatchFailure(u.first, 0, errBatch)
	}
	for i := range g.messages {
		if s := l.ring.at(g.first + uint64(i)); s.state == sent {
			l.ring.replied(s, settled)
			l.dropped++
		}
	}
	g.clear()
}

// EndTransaction says that all rows of the transaction were sent.
func (l *Lane) EndTransaction() {
	if l.stage.kind == jetstream.BatchAtomic {
		l.sending.Lock()
		defer l.sending.Unlock()
		if l.stage.whole = len(l.stage.messages); l.stage.whole > 0 {
			l.letLinger()
		}
	}
}
