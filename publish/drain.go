package publish

import (
	"context"
	"errors"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
)

// Refusal is a row that its own reply refuses.
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
	l.fail(errDrained)
	done := l.cutWrites(ctx)
	l.sending.Lock()
	if ctx.Err() == nil {
		_ = l.flush()
	}
	l.forgetWire()
	l.forgetStaged()
	l.sending.Unlock()
	done()
	l.awaitReplies(ctx)
	refusals, doubts, memory := l.collect()
	for _, s := range doubts {
		own, err := l.isOwn(ctx, s.delivery, s.ack)
		switch {
		case err == nil && own:
			l.mu.Lock()
			l.stored = append(l.stored, s.delivery.Index)
			l.mu.Unlock()
		case err == nil, errors.Is(err, jetstream.ErrMessageGone):
			failure := rowErrorf(RowDuplicate,
				"JetStream took the row for the message at sequence %d, which is not there or is another",
				s.ack)
			failure.Wait = memory // until JetStream has forgotten the id
			refusals = append(refusals, Refusal{s.delivery, failure})
		}
		// Any other error says nothing about the row: it comes again.
	}
	return refusals
}

// cutWrites makes writes fail that the server does not read, from the end of ctx until
// the returned function is called: they hold sending, and would for writeTimeout.
func (l *Lane) cutWrites(ctx context.Context) (stop func()) {
	done := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
		case <-done:
			return
		}
		for {
			jetstream.CutWrite(l.cfg.Conn)
			select {
			case <-time.After(pollReplies): // a write may have begun since
			case <-done:
				return
			}
		}
	}()
	return func() { close(done) }
}

// pollReplies is the pause between two looks at what is in flight.
const pollReplies = 10 * time.Millisecond

// isOwn reports whether the message at a sequence is a row's.
func (l *Lane) isOwn(ctx context.Context, d Delivery, seq uint64) (bool, error) {
	m, err := l.cfg.Stream.Message(ctx, seq)
	if err != nil || m.ID != d.Ref.MessageID(l.cfg.Envelope.Source()) {
		return false, err
	}
	if l.cfg.IsGenuine == nil {
		return true, nil
	}
	return l.cfg.IsGenuine(ctx, d, seq, m)
}

func (l *Lane) awaitReplies(ctx context.Context) {
	t := time.NewTicker(pollReplies)
	defer t.Stop()
	for l.Counts().Inflight > 0 && l.cfg.Conn.IsConnected() {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (l *Lane) collect() (refusals []Refusal, doubts []entry, memory time.Duration) {
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
