package publish

import (
	"context"
	"errors"
	"time"

	"github.com/nats-io/nats.go"
)

// Refusal is a row whose own reply names a failure of its own.
type Refusal struct {
	Delivery
	Failure *RowError
}

// Drain waits until every message has had its reply, or until nothing can come
// any more: ctx is done or the connection is lost. The lane takes nothing new
// from now on. It returns the rows that were refused; rows that JetStream called
// duplicates and that are indeed in the stream join the stored ones (Take), the
// others are refused. Everything else that is unacknowledged is forgotten.
func (l *Lane) Drain(ctx context.Context) []Refusal {
	l.fail(ErrDrained)
	l.sending.Lock()
	_ = l.flush()
	l.forgetWire()
	l.forgetStaged()
	l.sending.Unlock()
	l.awaitReplies(ctx)
	refusals, doubts, memory := l.collect()
	for _, s := range doubts {
		id := s.delivery.Ref.MessageID(l.cfg.Envelope.Source())
		switch header, err := l.cfg.Stream.Header(ctx, s.ack); {
		case err == nil && header.Get(nats.MsgIdHdr) == id:
			l.mu.Lock()
			l.stored = append(l.stored, s.delivery.Index)
			l.mu.Unlock()
		case err == nil, errors.Is(err, ErrMessageGone):
			failure := rowErrorf(RowDuplicate, "JetStream took the row for the message at sequence %d, which is not there or is another", s.ack)
			failure.Wait = memory // until JetStream has forgotten the id
			refusals = append(refusals, Refusal{s.delivery, failure})
		}
		// Any other error says nothing about the row: it comes again.
	}
	return refusals
}

func (l *Lane) awaitReplies(ctx context.Context) {
	t := time.NewTicker(10 * time.Millisecond)
	defer t.Stop()
	for l.Counts().Inflight > 0 && l.cfg.Conn.IsConnected() {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (l *Lane) collect() (refusals []Refusal, doubts []slot, memory time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i := l.ring.tail; i < l.ring.head; i++ {
		switch s := l.ring.at(i); s.state {
		case refused:
			refusals = append(refusals, Refusal{s.delivery, s.failure})
		case doubted:
			doubts = append(doubts, *s)
		}
	}
	return refusals, doubts, l.memory
}
