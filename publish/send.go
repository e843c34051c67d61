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

// Send publishes a row of the WAL. Positions never go back: one that the publisher is past
// is sent as SendPolled does. It waits while the window is full and returns the
// publisher's failure once it has stopped. A *outbox.RowError is the row's own: nothing was sent,
// and the publisher goes on.
//
// The message is on its way when Flush was called, when much has gathered, or after
// 20 ms.
func (p *Publisher) Send(ctx context.Context, ev *outbox.Event, tag any) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	if p.last.Covers(ev.Commit, ev.N) {
		// It is late: an earlier session went past it and could not finish with it, such as
		// one that ended before it had recorded that the row was to wait.
		p.Pass(ev.Commit)
		return p.send(ctx, ev, p.last, passage{tag: tag, via: jetstream.ViaPoll})
	}
	at := p.last
	at.Commit, at.N = ev.Commit, ev.N
	return p.send(ctx, ev, at, passage{tag: tag})
}

// SendPolled publishes a row of the table, or one of the WAL that had to wait, as Send
// does the others. Its message repeats the last position, so that positions never go
// back. Pass is to be called before.
func (p *Publisher) SendPolled(ctx context.Context, ev *outbox.Event, tag any) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.sendAlone(ctx, ev, passage{tag: tag, via: jetstream.ViaPoll})
}

// Replayed is told of the PubAcks of one request's messages. It must not block.
type Replayed interface{ Stored(seq uint64) }

// SendReplay publishes a row again that was stored before, for a request. The message has an id of its
// own and says nothing about the row: it is released by its PubAck, and the marker does not see it.
func (p *Publisher) SendReplay(ctx context.Context, ev *outbox.Event, request int64, by Replayed) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.sendAlone(ctx, ev, passage{tag: by, via: jetstream.ViaReplay, replay: request})
}

// sendAlone sends a row that is of no transaction that goes on.
func (p *Publisher) sendAlone(ctx context.Context, ev *outbox.Event, how passage) error {
	err := p.send(ctx, ev, p.last, how)
	if g := &p.stage; err == nil && g.whole == len(g.messages)-1 {
		g.whole = len(g.messages)
	}
	return err
}

// passage is what a message's sender says of it.
type passage struct {
	tag    any
	via    string
	replay int64 // the request's number
}

// Pass notes that rows committed up to an LSN may be sent although the WAL has
// not brought them: every later message says so until the WAL is past it.
func (p *Publisher) Pass(lsn outbox.LSN) {
	for {
		old := p.passed.Load()
		if uint64(lsn) <= old || p.passed.CompareAndSwap(old, uint64(lsn)) {
			return
		}
	}
}

// Passed is the greatest LSN that Pass was called with.
func (p *Publisher) Passed() outbox.LSN { return outbox.LSN(p.passed.Load()) }

// send is Send for the holder of sending.
func (p *Publisher) send(ctx context.Context, ev *outbox.Event, at outbox.Position, how passage) error {
	if err := p.cfg.Envelope.checkOmitted(ev); err != nil {
		return err
	}
	subject, err := p.cfg.Subjects.Of(ev)
	if err != nil {
		return err
	}
	ref := ev.Ref()
	staged := p.stage.used()
	stamp := Stamp{
		Ref: ref, Position: at, Via: how.via, Commit: ev.Commit, N: ev.N, Replay: how.replay,
		Staged: staged, Chained: p.cfg.Chained, ExpectedLast: p.cfg.Base + p.ring.head,
	}
	if stamp.Position.Passed = p.Passed(); stamp.Position.Passed < at.Commit {
		stamp.Position.Passed = 0 // it says nothing that the position does not
	}
	header, body, err := p.cfg.Envelope.Build(ev, stamp)
	alone := err == nil && staged &&
		p.cfg.Envelope.Room(len(header), len(body)) < batchHeaders+len(p.cfg.Stream.Name())
	if alone {
		stamp.Staged = false
		header, body, err = p.cfg.Envelope.Build(ev, stamp)
	}
	if err == nil && p.cfg.Check != nil {
		err = p.cfg.Check(ev)
	}
	if err != nil {
		return err
	}
	p.last = at // only now: a row that is refused may be one of long ago
	var trace Trace
	if p.cfg.Trace != nil {
		trace = p.cfg.Trace(ev, subject)
	}
	index, err := p.enter(ctx, entry{
		delivery: Delivery{
			Ref: ref, XID: ev.XID, EventType: p.intern(ev.Values[outbox.EventType]),
			Tag: how.tag, Trace: trace,
			Bytes: len(subject) + len(header) + len(body), Replay: how.replay, Key: keyOf(ev),
		},
		subject: subject, commit: micros(ev.CommitTime),
	})
	if err != nil {
		return err
	}
	if staged {
		p.stage.add(subject, index, ev.Commit, header, body, alone)
	} else {
		if p.wire.empty() {
			p.unwritten = index
		}
		p.reply = strconv.AppendUint(append(p.reply[:0], p.inbox...), index, 36)
		if err := p.wire.publish(subject, p.reply, header, nil, body); err != nil {
			return p.broken(err)
		}
	}
	p.letLinger()
	return nil
}

// keyOf is [Delivery.Key].
func keyOf(ev *outbox.Event) string {
	if ev.Table.PartitionKey == outbox.ID {
		return ""
	}
	return string(ev.Values[ev.Table.PartitionKey])
}

// letLinger has something flushed in a while.
func (p *Publisher) letLinger() {
	if !p.lingering {
		p.lingering = true
		p.linger.Reset(maxLinger)
	}
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// makeRoom has sent what stands in the way of PubAcks.
func (p *Publisher) makeRoom() (bool, error) {
	gone, err := p.publishStaged(true)
	return gone, errors.Join(err, p.wire.flush())
}

// Flush has everything that was sent written, as far as it was not, or as soon as the
// unit that is under way has its PubAck. It costs next to nothing where there is nothing
// to do.
func (p *Publisher) Flush() error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return p.flush()
}

func (p *Publisher) flush() error {
	if !p.lingering && len(p.stage.messages) == 0 {
		return nil
	}
	p.linger.Stop()
	p.lingering = false
	if err := p.Err(); err != nil && !errors.Is(err, errDrained) {
		p.forgetWire() // so that nothing of it comes in the midst of the next session
		return nil
	}
	_, err := p.publishStaged(false)
	if err := errors.Join(err, p.wire.flush()); err != nil {
		return p.broken(err)
	}
	return nil
}

// forgetWire drops what is in the wire's buffer: it will have no reply.
func (p *Publisher) forgetWire() {
	if p.wire.empty() {
		return
	}
	p.wire.forget()
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := p.unwritten; !p.stage.used() && i < p.ring.head; i++ {
		if s := p.ring.at(i); s.state == sent {
			p.ring.replied(s, released)
			p.dropped++
		}
	}
}

func (p *Publisher) broken(err error) error {
	err = fmt.Errorf("publish: %w", err)
	p.fail(err)
	return err
}

// intern returns the same string for the same event type: the ring's entries then
// share it.
func (p *Publisher) intern(eventType []byte) string {
	s, ok := p.types[string(eventType)]
	if !ok {
		if len(p.types) >= maxCachedSubjects {
			clear(p.types)
		}
		s = string(eventType)
		p.types[s] = s
	}
	return s
}

// enter waits for a place in the window and takes it.
func (p *Publisher) enter(ctx context.Context, s entry) (uint64, error) {
	for {
		p.mu.Lock()
		index, err, room := p.ring.head, p.err, p.hasRoom(s.delivery.Bytes) && !p.stage.isFull(p.underWay())
		if err == nil && room {
			s.sentAt = p.ticks
			p.ring.push(s)
		}
		p.mu.Unlock()
		if err != nil || room {
			return index, err
		}
		if gone, err := p.makeRoom(); err != nil {
			return 0, p.broken(err)
		} else if gone {
			continue
		}
		select {
		case <-p.room:
		case <-p.failed:
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

// beyond is how many messages were sent since the oldest one whose row is not marked, that one included.
func (p *Publisher) beyond() uint64 {
	if p.reserve > 0 {
		return p.ring.head + p.reserve
	}
	return p.ring.head - p.ring.tail
}

func (p *Publisher) hasRoom(size int) bool {
	r := p.ring
	if p.beyond() >= jetstream.U || r.inflight >= p.cfg.Window || p.first && r.inflight > 0 {
		return false
	}
	return r.inflight == 0 || r.bytes+size <= p.cfg.WindowBytes
}
