package publish

import (
	"errors"

	"github.com/walpost/walpost/internal/jetstream"
)

// errBatch means that a batch was not stored as it was sent. Only the stream knows
// what of it was.
var errBatch = errors.New("a batch was not stored as it was sent")

// unit is what a publisher with batches has under way: one message, or one batch. While it is,
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
//	failed    the publisher has stopped     grow: an error               -
//
// A write that fails cuts what is open or closing. A reply is a PubAck for the whole batch,
// or what makes it fail. The unit of one message has its reply in the ring.
//
// The sender changes it under both locks of the publisher. A reply changes only state, under mu. So
// the other fields may be read under either lock, state under mu.
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
func (p *Publisher) underWay() bool { return p.unit.state == unitComplete && p.ring.low < p.unit.end() }

// publishStaged publishes the next unit, or a chunk of it, and says whether there was any,
// unless one is under way: then what is staged goes when that has its PubAck. More is set
// where more is to come at once: then a fast batch goes on, and an atomic one may end in
// the midst of a transaction.
func (p *Publisher) publishStaged(more bool) (bool, error) {
	g := &p.stage
	p.mu.Lock()
	ready := g.ready(more, p.ring.inflight)
	if ready == 0 {
		p.mu.Unlock()
		return false, nil
	}
	messages, bytes := g.mostInUnit()
	roomy := p.ring.inflight+chunkMessages <= messages && p.ring.bytes+chunkBytes <= bytes
	n, goesOn := g.next(ready, more && g.isChunk() && roomy)
	wait := p.underWay()
	if wait {
		p.due = p.due || !more // with more the sender comes again itself
	} else {
		p.due = n < ready && !goesOn
	}
	stopped := p.err != nil && !errors.Is(p.err, errDrained)
	p.mu.Unlock()
	if wait || stopped {
		return false, nil
	}
	return true, p.publishUnit(n, goesOn)
}

// publishUnit writes the first n staged messages. A unit that goes on is not complete.
func (p *Publisher) publishUnit(n int, goesOn bool) error {
	g, u := &p.stage, &p.unit
	p.mu.Lock()
	err := u.grow(g.first, n, goesOn)
	if err != nil {
		err = errors.Join(p.err, err)
	}
	p.mu.Unlock()
	if err != nil {
		return err
	}
	if err := p.writeStaged(n, goesOn); err != nil {
		p.mu.Lock()
		u.cut()
		p.mu.Unlock()
		return err
	}
	if goesOn {
		p.lingering = false
		p.letLinger() // from here on
	} else {
		p.complete()
	}
	g.drop(n)
	return nil
}

// writeStaged writes the first n staged messages, which the unit has.
func (p *Publisher) writeStaged(n int, goesOn bool) error {
	g, u := &p.stage, &p.unit
	start := 0
	for i, s := range g.messages[:n] {
		if i%64 == 63 { // large ones take their time
			if err := p.Err(); err != nil && !errors.Is(err, errDrained) {
				return err
			}
		}
		at := place{unit: u, n: u.n - n + i, last: i == n-1 && !goesOn}
		header, more := g.arena[start:s.header], []byte(nil)
		if !s.alone {
			header = header[:len(header)-len(headerEnd)]
			more = p.coder.header(at)
		}
		body := g.arena[s.header:s.body]
		if err := p.wire.publish(s.subject, p.coder.reply(at), header, more, body); err != nil {
			return err
		}
		start = s.body
	}
	return nil
}

// complete notes that a unit was written in full.
func (p *Publisher) complete() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.unit.written() {
		return
	}
	for i := p.unit.first; i < p.unit.end(); i++ {
		if s := p.ring.at(i); s.state == sent {
			s.sentAt = p.ticks // the time for the PubAck begins when all is written
		}
	}
}

// forgetStaged drops the messages that were never written, and a batch that will never end.
func (p *Publisher) forgetStaged() {
	g, u := &p.stage, &p.unit
	p.mu.Lock()
	defer p.mu.Unlock()
	if u.state == unitOpen || u.state == unitCut {
		p.onBatchFailure(u.first, 0, errBatch)
	}
	for i := range g.messages {
		if s := p.ring.at(g.first + uint64(i)); s.state == sent {
			p.ring.replied(s, released)
			p.dropped++
		}
	}
	g.clear()
}

// EndTransaction says that all rows of the transaction were sent.
func (p *Publisher) EndTransaction() {
	if p.stage.kind == jetstream.BatchAtomic {
		p.sending.Lock()
		defer p.sending.Unlock()
		if p.stage.whole = len(p.stage.messages); p.stage.whole > 0 {
			p.letLinger()
		}
	}
}
