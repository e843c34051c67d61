package publish

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
)

const (
	// fencePatience bounds the wait for one answer.
	fencePatience = 2 * time.Second
	// fenceQuiet is how long nothing may have been stored before a stream that another
	// connection may have written to counts as quiet.
	fenceQuiet = 200 * time.Millisecond
)

// Fence sees that nothing that the relay has sent before is stored from now on, and
// returns the stream as it is then. It is for streams that are the relay's alone.
//
// Messages that are under way one behind the other are chained by their sequences only.
// One that an earlier session has sent, and that is stored after a new one has read where
// the stream ends, moves the ends of both chains against each other: some messages are
// refused then, and later ones of the same chain are stored, in a wrong order. So the
// stream is asked with a message that it has to refuse: on one connection its answer
// comes after all that was sent before. What a lost connection, or a process that was
// killed, has left in the server's buffers is behind no such answer: there, where fresh
// says that the connection is another one than at the last call, Fence also waits until
// nothing more was stored for 200 ms. So it does where the relay may not publish on the
// subject, see [Stream.Deny]. That is no guarantee; what comes later still meets a lane
// whose first message goes alone, and most likely sequences that have been taken. Batches
// are not concerned: they are stored whole, and one is under way at a time.
func (s *Stream) Fence(ctx context.Context, fresh bool) (*StreamInfo, error) {
	if fresh {
		s.denied.Store(nil)
	}
	info, err := s.Info(ctx)
	if err != nil {
		return nil, err
	}
	subject := s.fenceSubject(info)
	before, quiet := uint64(0), false
	for {
		last, asked, err := s.askRefused(ctx, subject)
		if err != nil {
			return nil, err
		}
		if info, err = s.Info(ctx); err != nil {
			return nil, err
		}
		// In a cluster the leader counts what it has not stored yet.
		settled := info.LastSeq >= last
		if settled && (asked && !fresh || quiet && info.LastSeq == before) {
			return info, nil
		}
		before, quiet = info.LastSeq, settled
		if !sleep(ctx, fenceQuiet) {
			return nil, ctx.Err()
		}
	}
}

// Deny notes that the server does not let the relay publish on a subject.
func (s *Stream) Deny(subject string) { s.denied.Store(&subject) }

// askRefused publishes a message that JetStream refuses for its expectation, and returns
// the sequence that the stream ends with at that point, 0 where the refusal does not say.
// It reports whether it could ask.
func (s *Stream) askRefused(ctx context.Context, subject string) (last uint64, asked bool, err error) {
	denied := func() bool { p := s.denied.Load(); return subject == "" || p != nil && *p == subject }
	if denied() {
		return 0, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, fencePatience)
	defer cancel()
	reply, err := s.nc.RequestMsgWithContext(ctx, &nats.Msg{Subject: subject, Header: nats.Header{
		nats.ExpectedStreamHdr:  {s.cfg.Name},
		nats.ExpectedLastSeqHdr: {strconv.FormatInt(math.MaxInt64, 10)},
	}})
	if err != nil && denied() {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, fmt.Errorf("ask stream %s on subject %s: %w", s.cfg.Name, subject, err)
	}
	_, err = ParseAck(reply, s.cfg.Name)
	var refusal *AckError
	if !errors.As(err, &refusal) {
		return 0, false, fmt.Errorf("ask stream %s on subject %s: %w", s.cfg.Name, subject, err)
	}
	_, tail, _ := strings.Cut(refusal.Description, ": ")
	last, _ = strconv.ParseUint(tail, 10, 64)
	return last, true, nil
}

// fenceSubject is one that the stream listens on and that the relay has a use for, empty
// where there is none.
func (s *Stream) fenceSubject(info *StreamInfo) string {
	for _, p := range info.Config.Subjects {
		if overlap(p, s.cfg.Pattern) {
			return meet(p, s.cfg.Pattern)
		}
	}
	return ""
}

// meet is a subject that is matched by two patterns that overlap.
func meet(a, b string) string {
	const any = "walpost"
	var tokens []string
	for {
		p, aRest, aMore := strings.Cut(a, ".")
		q, bRest, bMore := strings.Cut(b, ".")
		t := p
		if p == "*" || p == ">" {
			t = q
		}
		if t == "*" || t == ">" {
			t = any
		}
		tokens = append(tokens, t)
		if p == ">" && bMore {
			aRest, aMore = ">", true
		}
		if q == ">" && aMore {
			bRest, bMore = ">", true
		}
		if !aMore || !bMore {
			return strings.Join(tokens, ".")
		}
		a, b = aRest, bRest
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
