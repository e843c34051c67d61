package jetstream

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
)

const (
	// fencePatience bounds the wait for the answer of a stream that is asked.
	fencePatience = 2 * time.Second
	// fenceQuiet is how long nothing may have been stored before a stream that another
	// connection may have written to counts as quiet, and quietPatience bounds the wait
	// for that.
	fenceQuiet    = 200 * time.Millisecond
	quietPatience = 5 * time.Second
)

// Fence sees that nothing that the relay has sent before is stored from now on, and
// returns the stream as it is then. It is for streams that are the relay's alone.
//
// Messages that are under way one behind the other are chained by their sequences only.
// One that an earlier session has sent, and that is stored after a new one has read where
// the stream ends, moves the ends of both chains against each other: some messages are
// refused then, and later ones of the same chain are stored, in a wrong order. So the
// stream is asked with a message that it has to refuse: on one connection its answer
// comes after all that was sent before.
//
// What a lost connection, or a process that was killed, has left in the server's buffers
// is behind no such answer: there, where fresh says that the connection is another one
// than at the last call, and where the stream cannot be asked, Fence waits until nothing
// more was stored for 200 ms. That is no guarantee; what comes later still meets a publisher
// whose first message goes alone, and most likely sequences that have been taken. Batches
// are not concerned: they are stored whole, and one is under way at a time.
//
// acked is the greatest sequence that was acknowledged, 0 where none is known: a replica
// that has become the leader may say where the stream ends before it has applied that, and
// is asked again for 5 s.
//
// doubt says why the fence is less than it could be: the stream gave no such answer, it
// did not come to acked, or it was not quiet within 5 s, because somebody else goes on
// writing to it.
func (s *Stream) Fence(ctx context.Context, fresh bool, acked uint64) (info *StreamInfo, doubt, err error) {
	if info, err = s.Info(ctx); err != nil {
		return nil, nil, err
	}
	last, doubt := s.askRefused(ctx, s.fenceSubject(info), fresh)
	if ctx.Err() != nil {
		return nil, nil, ctx.Err()
	}
	if info.Config.Replicas > 1 {
		last = max(last, acked)
	}
	for begun, before, looked := time.Now(), uint64(0), false; ; looked = true {
		if info, err = s.Info(ctx); err != nil {
			return nil, nil, err
		}
		// In a cluster the leader counts what it has not stored yet.
		if info.LastSeq >= last && (doubt == nil && !fresh || looked && info.LastSeq == before) {
			return info, doubt, nil
		}
		if time.Since(begun) > quietPatience {
			if info.LastSeq < last {
				return info, fmt.Errorf("the stream ends at sequence %d, and its leader has named %d before",
					info.LastSeq, last), nil
			}
			return info, hint.Errorf("let nobody else publish into the relay's stream, or set nats.shared",
				"the stream is not quiet: it has gone on to sequence %d", info.LastSeq), nil
		}
		before = info.LastSeq
		if !sleep.For(ctx, fenceQuiet) {
			return nil, nil, ctx.Err()
		}
	}
}

// asking is the subject that a stream is asked on.
type asking struct {
	mu      sync.Mutex
	subject string
	denied  bool
	stop    context.CancelFunc // nil while nothing is asked
}

// Deny notes that the server does not let the relay publish on a subject.
func (s *Stream) Deny(subject string) {
	s.asking.mu.Lock()
	defer s.asking.mu.Unlock()
	if s.asking.subject != subject {
		return
	}
	s.asking.denied = true
	if s.asking.stop != nil {
		s.asking.stop()
	}
}

// begin reports whether there is any use in asking.
func (a *asking) begin(subject string, fresh bool, stop context.CancelFunc) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.denied = a.denied && !fresh && a.subject == subject
	a.subject, a.stop = subject, stop
	return !a.denied
}

func (a *asking) end() (denied bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stop = nil
	return a.denied
}

// askRefused publishes a message that JetStream refuses for its expectation, and returns
// the sequence that the stream ends with at that point.
func (s *Stream) askRefused(ctx context.Context, subject string, fresh bool) (last uint64, err error) {
	if subject == "" {
		return 0, hint.Errorf("let the stream listen on "+s.cfg.Pattern,
			"the stream listens on no subject of the relay's")
	}
	ctx, cancel := context.WithTimeout(ctx, fencePatience)
	defer cancel()
	allow := fmt.Sprintf("let the user publish on %s, and let no other client answer there: "+
		"JetStream refuses the message, and never stores it", subject)
	denied := hint.Errorf(allow, "no permission to publish on %s", subject)
	if !s.asking.begin(subject, fresh, cancel) {
		return 0, denied
	}
	reply, err := s.nc.RequestMsgWithContext(ctx, s.refused(subject))
	if s.asking.end() {
		return 0, denied
	}
	if err == nil {
		last, err = refusedAt(reply.Data)
	}
	if err != nil {
		return 0, hint.Errorf(allow, "a message on %s that the stream was to refuse: %w", subject, err)
	}
	return last, nil
}

// refusedAt reads a refusal for the last sequence, which names it.
func refusedAt(reply []byte) (last uint64, err error) {
	var ack struct {
		Error *jetstream.APIError `json:"error"`
	}
	switch err := json.Unmarshal(reply, &ack); {
	case err != nil || ack.Error == nil:
		return 0, fmt.Errorf("it was answered with %.80q", reply)
	case ack.Error.ErrorCode != jetstream.JSErrCodeStreamWrongLastSequence:
		return 0, ack.Error
	}
	_, tail, _ := strings.Cut(ack.Error.Description, ": ")
	return strconv.ParseUint(tail, 10, 64)
}

// fenceSubject is one that the stream listens on and that the relay has a use for, empty
// where there is none.
func (s *Stream) fenceSubject(info *StreamInfo) string {
	for _, p := range info.Config.Subjects {
		if Overlap(p, s.cfg.Pattern) {
			return meet(p, s.cfg.Pattern)
		}
	}
	return ""
}
