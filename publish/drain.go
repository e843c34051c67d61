package publish

import (
	"context"
	"errors"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// Refusal is a row that its own reply refuses.
type Refusal struct {
	Delivery
	Failure *outbox.RowError
}

// Drain waits until every message has had its reply, or until nothing can come
// any more: ctx is done or the connection is lost. The publisher takes nothing new
// from now on. It returns the rows that were refused; rows that JetStream called
// duplicates and that are indeed in the stream join the stored ones (Take), the
// others are refused, and so are those that one replay has published twice.
// Everything else that is unacknowledged is forgotten.
func (p *Publisher) Drain(ctx context.Context) []Refusal {
	p.fail(errDrained)
	done := p.cutWrites(ctx)
	p.sending.Lock()
	if ctx.Err() == nil {
		_ = p.flush()
	}
	p.forgetWire()
	p.forgetStaged()
	p.sending.Unlock()
	done()
	p.awaitReplies(ctx)
	refusals, doubts, memory := p.collect()
	for _, s := range doubts {
		own, err := p.isOwn(ctx, s.delivery, s.ack)
		switch {
		case err == nil && own && s.delivery.Replay != 0:
			refusals = append(refusals, Refusal{s.delivery, rowErrorf(outbox.RowDuplicate,
				"its message of this replay is in the stream already, at sequence %d", s.ack)})
		case err == nil && own:
			p.mu.Lock()
			p.stored = append(p.stored, s.delivery.Index)
			p.mu.Unlock()
		case err == nil, errors.Is(err, jetstream.ErrMessageGone):
			failure := rowErrorf(outbox.RowDuplicate,
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
func (p *Publisher) cutWrites(ctx context.Context) (stop func()) {
	done := make(chan struct{})
	go func() {
		select {
		case <-ctx.Done():
		case <-done:
			return
		}
		for {
			jetstream.CutWrite(p.cfg.Conn)
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
func (p *Publisher) isOwn(ctx context.Context, d Delivery, seq uint64) (bool, error) {
	m, err := p.cfg.Stream.Message(ctx, seq)
	id := d.Ref.MessageID(p.cfg.Envelope.Source())
	if d.Replay != 0 {
		id = string(outbox.AppendReplay([]byte(id), d.Replay))
	}
	if err != nil || m.ID != id {
		return false, err
	}
	if p.cfg.IsGenuine == nil {
		return true, nil
	}
	return p.cfg.IsGenuine(ctx, d, m)
}

// awaitReplies ends early with the connection that the messages were sent on: the client may have made
// another at once, on which their replies do not come.
func (p *Publisher) awaitReplies(ctx context.Context) {
	t := time.NewTicker(pollReplies)
	defer t.Stop()
	for p.Counts().Inflight > 0 && p.cfg.Conn.IsConnected() && p.cfg.Conn.Stats().Reconnects == p.reconnects {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
	}
}

func (p *Publisher) collect() (refusals []Refusal, doubts []entry, memory time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := p.ring.tail; i < p.ring.head; i++ {
		switch s := p.ring.at(i); s.state {
		case refused:
			refusals = append(refusals, Refusal{s.delivery, s.failure})
		case doubted:
			doubts = append(doubts, *s)
		}
	}
	return refusals, doubts, p.memory
}
