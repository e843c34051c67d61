package consume

import (
	"log/slog"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/hint"
)

// waits logs why things do not go on: at first, once a minute, and when they do again.
type waits struct {
	log      *slog.Logger
	consumer string

	mu  sync.Mutex // guards all
	all map[string]*wait
}

type wait struct{ since, logged time.Time }

func newWaits(c *Config) *waits {
	return &waits{log: c.Logger, consumer: c.Name, all: map[string]*wait{}}
}

// set reports an error of doing something, or that it is over.
func (w *waits) set(what string, err error) {
	if err == nil {
		w.over(what)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	one := w.all[what]
	if one == nil {
		one = &wait{since: time.Now()}
		w.all[what] = one
	}
	if time.Since(one.logged) < time.Minute {
		return
	}
	one.logged = time.Now()
	args := []any{"consumer", w.consumer, "what", what, "error", err}
	if advice := hint.Of(err); advice != "" {
		args = append(args, "hint", advice)
	}
	w.log.Warn("consumer cannot go on, and tries again", args...)
}

func (w *waits) over(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if one := w.all[what]; one != nil {
		after := time.Since(one.since).Round(time.Millisecond)
		w.log.Info("consumer goes on", "consumer", w.consumer, "what", what, "after", after)
		delete(w.all, what)
	}
}

// forget drops what another process does now.
func (w *waits) forget(what string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.all, what)
}
