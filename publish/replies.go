package publish

import (
	"bytes"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

// onReply runs on the subscription's goroutine, in the order of arrival.
func (l *Lane) onReply(msg *nats.Msg) {
	l.takeReply(msg)
	if len(l.acked) > 0 { // the next batch is on its way meanwhile
		l.cfg.OnStored(l.acked)
		l.acked = l.acked[:0]
	}
}

func (l *Lane) takeReply(msg *nats.Msg) {
	tail := strings.TrimPrefix(msg.Subject, l.inbox)
	l.mu.Lock()
	defer l.mu.Unlock()
	id, state, fast := strings.Cut(tail, ".")
	if fast && bytes.HasPrefix(msg.Data, []byte(`{"type":"ack"`)) {
		// It acknowledges some of a batch. Only the PubAck at its end proves the batch.
		if s := l.ring.at(l.ring.low); s.state == sent {
			s.sentAt = l.ticks
		}
		return
	}
	defer l.replied()
	if fast {
		l.onFastReply(msg, id, state)
		return
	}
	index, err := strconv.ParseUint(tail, 36, 64)
	if err != nil || !l.ring.holds(index) || l.ring.at(index).state != sent {
		return
	}
	ack, err := parseAck(msg, l.cfg.Stream.Name())
	s := l.ring.at(index)
	batched := l.endsAtomic(index)
	switch {
	case batched && err != nil:
		l.onBatchFailure(l.unit.first, 0, err)
	case batched:
		l.onBatch(l.unit.first, ack)
	case err != nil:
		l.onFailure(s, err)
	case ack.Duplicate:
		s.ack = ack.Seq
		l.ring.replied(s, doubted)
		l.failLocked(fmt.Errorf("%w: %s, at sequence %d", ErrDoubtful, s.delivery.Ref, ack.Seq))
	case l.cfg.Chained && ack.Seq != l.cfg.Base+index+1:
		l.ring.replied(s, settled)
		l.failLocked(fmt.Errorf("%w: stored at sequence %d, expected %d",
			ErrChain, ack.Seq, l.cfg.Base+index+1))
	default:
		l.onStored(s, index, ack.Seq)
	}
}

// replied wakes the sender: a reply may have made room, or ended a unit. The caller holds mu.
func (l *Lane) replied() {
	signal(l.room)
	if l.due && !l.underWay() {
		l.due = false
		go func() { _ = l.Flush() }()
	}
}

func (l *Lane) onStored(s *entry, index, seq uint64) {
	l.highest, l.first = max(l.highest, seq), false
	l.ring.replied(s, stored)
	l.stored = append(l.stored, index)
	if l.cfg.OnStored != nil {
		if n := len(l.acked); n > 0 && l.acked[n-1].Commit == s.commit {
			l.acked[n-1].N++
		} else {
			l.acked = append(l.acked, Stored{s.commit, 1})
		}
	}
	signal(l.news)
}

// onFailure keeps what is the row's own and stops the lane.
func (l *Lane) onFailure(s *entry, err error) {
	var ack *ackError
	if errors.As(err, &ack) && ack.Row() != nil {
		s.failure = ack.Row()
		l.ring.replied(s, refused)
	} else {
		l.ring.replied(s, settled) // the WAL or the table brings it again
		l.dropped++
	}
	if ClassOf(err) == ClassChain {
		err = fmt.Errorf("%w: %w", ErrChain, err)
	}
	l.failLocked(fmt.Errorf("publish %s: %w", s.delivery.Ref, err))
}

// Deny notes that the server does not let the relay publish on a subject: rows
// in flight on it are refused, and later ones are refused before sending.
func (l *Lane) Deny(subject string) {
	l.cfg.Subjects.Deny(subject)
	l.mu.Lock()
	defer l.mu.Unlock()
	var denied []uint64
	for i := l.ring.low; i < l.ring.head; i++ {
		if s := l.ring.at(i); s.state == sent && s.subject == subject {
			s.failure = rowErrorf(RowPermission, "the server does not permit publishing on %s", subject)
			l.ring.replied(s, refused)
			l.failLocked(fmt.Errorf("publish on %s: permission denied", subject))
			denied = append(denied, i)
		}
	}
	for _, i := range denied {
		l.dropBatchOf(i) // which may never be complete
	}
}

// ackTicks is how many ticks of the lane's clock a PubAck may take.
const ackTicks = 10

// watch stops the lane when a PubAck is overdue or the connection is lost.
func (l *Lane) watch() {
	t := time.NewTicker(l.cfg.AckTimeout / ackTicks)
	defer t.Stop()
	for {
		select {
		case <-l.done:
			return
		case <-l.status:
			l.fail(nats.ErrDisconnected)
		case <-t.C:
			l.checkOverdue()
		}
	}
}

func (l *Lane) checkOverdue() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ticks++
	if l.ring.inflight == 0 {
		return
	}
	staged := l.stage.used() && !l.underWay()
	if s := l.ring.at(l.ring.low); !staged && l.ticks-s.sentAt > ackTicks {
		l.failLocked(fmt.Errorf("publish %s: %w", s.delivery.Ref, ErrAckTimeout))
	}
}
