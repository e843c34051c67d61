package publish

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/outbox"
)

// onReply runs on the subscription's goroutine, in the order of arrival.
func (p *Publisher) onReply(msg *nats.Msg) {
	p.takeReply(msg)
	if len(p.acked) > 0 { // the next batch is on its way meanwhile
		p.cfg.OnStored(p.acked)
		p.acked = p.acked[:0]
	}
}

func (p *Publisher) takeReply(msg *nats.Msg) {
	tail := strings.TrimPrefix(msg.Subject, p.inbox)
	p.mu.Lock()
	defer p.mu.Unlock()
	id, state, fast := strings.Cut(tail, ".")
	if fast && bytes.HasPrefix(msg.Data, []byte(`{"type":"ack"`)) {
		// It acknowledges some of a batch. Only the PubAck at its end proves the batch.
		if s := p.ring.at(p.ring.low); s.state == sent {
			s.sentAt = p.ticks
		}
		return
	}
	defer p.replied()
	if fast {
		p.onFastReply(msg, id, state)
		return
	}
	index, err := strconv.ParseUint(tail, 36, 64)
	if err != nil || !p.ring.holds(index) || p.ring.at(index).state != sent {
		return
	}
	ack, err := parseAck(msg, p.cfg.Stream.Name())
	s := p.ring.at(index)
	batched := p.endsAtomic(index)
	switch {
	case batched && err != nil:
		p.onBatchFailure(p.unit.first, 0, err)
	case batched:
		p.onBatch(p.unit.first, ack)
	case err != nil:
		p.onFailure(s, err)
	case ack.Duplicate:
		s.ack = ack.Seq
		p.ring.replied(s, doubted)
		p.failLocked(fmt.Errorf("%w: %s, at sequence %d", ErrDoubtful, s.delivery.Ref, ack.Seq))
	case p.cfg.Chained && ack.Seq != p.cfg.Base+index+1:
		p.ring.replied(s, released)
		p.failLocked(fmt.Errorf("%w: stored at sequence %d, expected %d",
			ErrChain, ack.Seq, p.cfg.Base+index+1))
	default:
		p.onStored(s, index, ack.Seq)
	}
}

// replied wakes the sender: a reply may have made room, or ended a unit. The caller holds mu.
func (p *Publisher) replied() {
	signal(p.room)
	if p.due && !p.underWay() {
		p.due = false
		go func() { _ = p.Flush() }()
	}
}

func (p *Publisher) onStored(s *entry, index, seq uint64) {
	p.highest, p.first = max(p.highest, seq), false
	s.ack = seq
	p.ring.replied(s, stored)
	if s.delivery.Replay != 0 {
		s.delivery.Tag.(Replayed).Stored(seq)
		p.ring.release(index)
		return
	}
	trace := s.delivery.Trace
	if trace != nil {
		trace.Stored(seq)
	}
	p.stored = append(p.stored, index)
	if p.cfg.OnStored != nil {
		n := len(p.acked)
		if n > 0 && trace == nil && p.acked[n-1].Trace == nil && p.acked[n-1].Commit == s.commit {
			p.acked[n-1].N++
		} else {
			p.acked = append(p.acked, Stored{s.commit, 1, trace})
		}
	}
	signal(p.news)
}

// onFailure keeps what is the row's own and stops the publisher.
func (p *Publisher) onFailure(s *entry, err error) {
	var ack *ackError
	if errors.As(err, &ack) && ack.Row() != nil {
		s.failure = ack.Row()
		p.ring.replied(s, refused)
	} else {
		p.ring.replied(s, released) // the WAL or the table brings it again
		p.dropped++
	}
	if ClassOf(err) == ClassChain {
		err = fmt.Errorf("%w: %w", ErrChain, err)
	}
	p.failLocked(fmt.Errorf("publish %s: %w", s.delivery.Ref, err))
}

// Deny notes that the server does not let the relay publish on a subject: rows
// in flight on it are refused, and later ones are refused before sending.
func (p *Publisher) Deny(subject string) {
	p.cfg.Subjects.Deny(subject)
	p.mu.Lock()
	defer p.mu.Unlock()
	var denied []uint64
	for i := p.ring.low; i < p.ring.head; i++ {
		if s := p.ring.at(i); s.state == sent && s.subject == subject {
			s.failure = rowErrorf(outbox.RowPermission, "the server does not permit publishing on %s",
				subject)
			p.ring.replied(s, refused)
			p.failLocked(fmt.Errorf("publish on %s: permission denied", subject))
			denied = append(denied, i)
		}
	}
	for _, i := range denied {
		p.dropBatchOf(i) // which may never be complete
	}
}

// ackTicks is how many ticks of the publisher's clock a PubAck may take.
const ackTicks = 10

// watch stops the publisher when a PubAck is overdue or the connection is lost.
func (p *Publisher) watch() {
	t := time.NewTicker(p.cfg.AckTimeout / ackTicks)
	defer t.Stop()
	for {
		select {
		case <-p.done:
			return
		case <-p.status:
			p.fail(nats.ErrDisconnected)
		case <-t.C:
			p.checkOverdue()
		}
	}
}

func (p *Publisher) checkOverdue() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ticks++
	if p.ring.inflight == 0 {
		return
	}
	staged := p.stage.used() && !p.underWay()
	if s := p.ring.at(p.ring.low); !staged && p.ticks-s.sentAt > ackTicks {
		p.failLocked(fmt.Errorf("publish %s: %w", s.delivery.Ref, ErrAckTimeout))
	}
}
