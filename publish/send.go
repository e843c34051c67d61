package publish

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// maxLinger is how long a message stays in the wire's buffer at most, or staged where
// nothing is under way. It begins again with each chunk of a fast batch.
const maxLinger = 20 * time.Millisecond

// Send publishes a row of the WAL. Positions never go back: one that the lane is past
// is sent as SendPolled does. It waits while the window is full and returns the
// lane's failure once it has stopped. A *RowError is the row's own: nothing was sent,
// and the lane goes on.
//
// The message is on its way when Flush was called, when much has gathered, or after
// 20 ms.
func (l *Lane) Send(ctx context.Context, ev *outbox.Event, tag any) error {
	l.sending.Lock()
	defer l.sending.Unlock()
	if l.last.Covers(ev.Commit, ev.N) {
		// It is late: an earlier session went past it and could not finish with it, such as
		// one that ended before it had recorded that the row was to wait.
		l.Pass(ev.Commit)
		return l.send(ctx, ev, tag, l.last, jetstream.ViaPoll)
	}
	at := l.last
	at.Commit, at.N = ev.Commit, ev.N
	return l.send(ctx, ev, tag, at, "")
}

// SendPolled publishes a row of the table, or one of the WAL that had to wait, as Send
// does the others. Its message repeats the last position, so that positions never go
// back. Pass is to be called before.
func (l *Lane) SendPolled(ctx context.Context, ev *outbox.Event, tag any) error {
	l.sending.Lock()
	defer l.sending.Unlock()
	err := l.send(ctx, ev, tag, l.last, jetstream.ViaPoll)
	if g := &l.stage; err == nil && g.whole == len(g.messages)-1 { // it is of no transaction that goes on
		g.whole = len(g.messages)
	}
	return err
}

// Pass notes that rows committed up to an LSN may be sent although the WAL has
// not brought them: every later message says so until the WAL is past it.
func (l *Lane) Pass(lsn outbox.LSN) {
	for {
		old := l.passed.Load()
		if uint64(lsn) <= old || l.passed.CompareAndSwap(old, uint64(lsn)) {
			return
		}
	}
}

// Passed is the greatest LSN that Pass was called with.
func (l *Lane) Passed() outbox.LSN { return outbox.LSN(l.passed.Load()) }

// send is Send for the holder of sending.
func (l *Lane) send(ctx context.Context, ev *outbox.Event, tag any, at outbox.Position, via string) error {
	if err := l.cfg.Envelope.checkOmitted(ev); err != nil {
		return err
	}
	subject, err := l.cfg.Subjects.Of(ev)
	if err != nil {
		return err
	}
	ref := ev.Ref()
	staged := l.stage.used()
	stamp := Stamp{
		Ref: ref, Position: at, Via: via, Commit: ev.Commit, N: ev.N,
		Staged: staged, Chained: l.cfg.Chained, ExpectedLast: l.cfg.Base + l.ring.head,
	}
	if stamp.Position.Passed = l.Passed(); stamp.Position.Passed < at.Commit {
		stamp.Position.Passed = 0 // it says nothing that the position does not
	}
	header, body, err := l.cfg.Envelope.Build(ev, stamp)
	alone := err == nil && staged &&
		l.cfg.Envelope.Room(len(header), len(body)) < batchHeaders+len(l.cfg.Stream.Name())
	if alone {
		stamp.Staged = false
		header, body, err = l.cfg.Envelope.Build(ev, stamp)
	}
	if err != nil {
		return err
	}
	l.last = at // only now: a row that is refused may be one of long ago
	index, err := l.enter(ctx, entry{
		delivery: Delivery{
			Ref: ref, XID: ev.XID, EventType: l.intern(ev.Values[outbox.EventType]), Tag: tag,
			Bytes: len(subject) + len(header) + len(body),
		},
		subject: subject, commit: micros(ev.CommitTime),
	})
	if err != nil {
		return err
	}
	if staged {
		l.stage.add(subject, index, ev.Commit, header, body, alone)
	} else {
		if l.wire.empty() {
			l.unwritten = index
		}
		l.reply = strconv.AppendUint(append(l.reply[:0], l.inbox...), index, 36)
		if err := l.wire.publish(subject, l.reply, header, nil, body); err != nil {
			return l.broken(err)
		}
	}
	l.letLinger()
	return nil
}

// letLinger has something flushed in a while.
func (l *Lane) letLinger() {
	if !l.lingering {
		l.lingering = true
		l.linger.Reset(maxLinger)
	}
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// makeRoom has sent what stands in the way of PubAcks.
func (l *Lane) makeRoom() (bool, error) {
	gone, err := l.publishStaged(true)
	return gone, errors.Join(err, l.wire.flush())
}

// Flush has everything that was sent written, as far as it was not, or as soon as the
// unit that is under way has its PubAck. It costs next to nothing where there is nothing
// to do.
func (l *Lane) Flush() error {
	l.sending.Lock()
	defer l.sending.Unlock()
	return l.flush()
}

func (l *Lane) flush() error {
	if !l.lingering && len(l.stage.messages) == 0 {
		return nil
	}
	l.linger.Stop()
	l.lingering = false
	if err := l.Err(); err != nil && !errors.Is(err, errDrained) {
		l.forgetWire() // so that nothing of it comes in the midst of the next session
		return nil
	}
	_, err := l.publishStaged(false)
	if err := errors.Join(err, l.wire.flush()); err != nil {
		return l.broken(err)
	}
	return nil
}

// forgetWire drops what is in the wire's buffer: it will have no reply.
func (l *Lane) forgetWire() {
	if l.wire.empty() {
		return
	}
	l.wire.forget()
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := l.unwritten; !l.stage.used() && i < l.ring.head; i++ {
		if s := l.ring.at(i); s.state == sent {
			l.ring.replied(s, settled)
			l.dropped++
		}
	}
}

func (l *Lane) broken(err error) error {
	err = fmt.Errorf("publish: %w", err)
	l.fail(err)
	return err
}

// intern returns the same string for the same event type: the ring's entries then
// share it.
func (l *Lane) intern(eventType []byte) string {
	s, ok := l.types[string(eventType)]
	if !ok {
		if len(l.types) >= maxCachedSubjects {
			clear(l.types)
		}
		s = string(eventType)
		l.types[s] = s
	}
	return s
}

// enter waits for a place in the window and takes it.
func (l *Lane) enter(ctx context.Context, s entry) (uint64, error) {
	for {
		l.mu.Lock()
		index, err, room := l.ring.head, l.err, l.hasRoom(s.delivery.Bytes) && !l.stage.isFull(l.underWay())
		if err == nil && room {
			s.sentAt = l.ticks
			l.ring.push(s)
		}
		l.mu.Unlock()
		if err != nil || room {
			return index, err
		}
		if gone, err := l.makeRoom(); err != nil {
			return 0, l.broken(err)
		} else if gone {
			continue
		}
		select {
		case <-l.room:
		case <-l.failed:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (l *Lane) hasRoom(size int) bool {
	r := l.ring
	if r.head-r.tail+l.reserve >= jetstream.U || r.inflight >= l.cfg.Window || l.first && r.inflight > 0 {
		return false
	}
	return r.inflight == 0 || r.bytes+size <= l.cfg.WindowBytes
}
