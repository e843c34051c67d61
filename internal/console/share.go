package console

import (
	"context"
	"net/http"
	"sync"
	"time"
)

const (
	// askFor bounds an answer that asks several questions.
	askFor = 15 * time.Second
	// mostAnswers is how many different answers may be asked for at once.
	mostAnswers = 64
)

// share gives those who ask the same within a second one answer.
type share struct {
	mu      sync.Mutex // guards what follows
	answers map[string]*shared
	looked  time.Time // when somebody asked last
}

type shared struct {
	done  chan struct{} // closed when the rest is set
	value any
	err   error
	until time.Time // zero while it is asked for
}

// once answers by asking, or by what another viewer has asked for. The answer is kept for a while. It goes on
// where its viewer leaves: others may wait for it.
func (s *share) once(
	ctx context.Context, key string, keep time.Duration, ask func(context.Context) (any, error),
) (any, error) {
	s.look()
	return s.onceUnseen(ctx, key, keep, ask)
}

// onceUnseen is once for what no viewer asks.
func (s *share) onceUnseen(
	ctx context.Context, key string, keep time.Duration, ask func(context.Context) (any, error),
) (any, error) {
	a, mine := s.find(key)
	switch {
	case a == nil:
		return nil, refuse(http.StatusServiceUnavailable, "ask again in a few seconds",
			"too many questions at once")
	case mine:
		s.fill(ctx, a, keep, ask)
	}
	select {
	case <-a.done:
		return a.value, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// find is the answer to a question; nil where there are too many. mine: the caller has to fill it in.
func (s *share) find(key string) (a *shared, mine bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := time.Now()
	for k, a := range s.answers {
		if !a.until.IsZero() && a.until.Before(now) {
			delete(s.answers, k)
		}
	}
	if a, ok := s.answers[key]; ok {
		return a, false
	}
	if len(s.answers) >= mostAnswers {
		return nil, false
	}
	a = &shared{done: make(chan struct{})}
	if s.answers == nil {
		s.answers = map[string]*shared{}
	}
	s.answers[key] = a
	return a, true
}

func (s *share) fill(
	ctx context.Context, a *shared, keep time.Duration, ask func(context.Context) (any, error),
) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), askFor)
	defer cancel()
	a.err = context.Canceled // where ask panics
	defer func() {
		s.mu.Lock()
		a.until = time.Now().Add(keep)
		s.mu.Unlock()
		close(a.done)
	}()
	a.value, a.err = ask(ctx)
}

// changing is the context of a change: what has begun goes on where its viewer leaves. Answers from before
// are forgotten when it is done.
func (s *share) changing(r *http.Request) (ctx context.Context, done func()) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), askFor)
	return ctx, func() {
		cancel()
		s.forget()
	}
}

// look notes that somebody looks.
func (s *share) look() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.looked = time.Now()
}

// lookedSince reports whether somebody has asked since a time.
func (s *share) lookedSince(at time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.looked.After(at)
}

// forget has the next one who asks get a new answer, after a change.
func (s *share) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, a := range s.answers {
		if !a.until.IsZero() {
			delete(s.answers, key)
		}
	}
}
