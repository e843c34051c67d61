package drill

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

// watch follows the stream: when events are stored, and which messages are the drill's. mu guards the fields
// behind it.
type watch struct {
	d    *Drill
	done chan struct{}

	mu   sync.Mutex
	next uint64 // sequence: what comes before has been seen
	err  error  // why it ended
	// ahead is how far this machine's clock is ahead of JetStream's, and how long a message took at least.
	ahead    time.Duration
	anything bool
	own      map[outbox.MessageID]int // the drill's messages, and which event each is
	stored   map[int]time.Time        // when each event was stored first, by this machine's clock
	broken   time.Time                // when the fault was done; zero before
	first    time.Time                // when the next message was stored
}

func (d *Drill) startWatch(ctx context.Context) *watch {
	w := &watch{
		d: d, done: make(chan struct{}), next: d.first,
		own: map[outbox.MessageID]int{}, stored: map[int]time.Time{},
	}
	go w.run(ctx)
	return w
}

// run tries again: where a server has only started, what follows ends with an error.
func (w *watch) run(ctx context.Context) {
	defer close(w.done)
	for ctx.Err() == nil {
		err := w.d.cfg.Stream.Follow(ctx, jetstream.FollowOptions{
			From: w.position(), Waiting: func(error) {},
		}, w.see)
		w.mu.Lock()
		w.err = err
		w.mu.Unlock()
		sleep.For(ctx, 250*time.Millisecond)
	}
}

func (w *watch) see(m jetstream.Received) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.next, w.err = m.Seq+1, nil
	if took := time.Since(m.At); !w.anything || took < w.ahead {
		w.ahead, w.anything = took, true
	}
	if !m.Relayed || m.Source != w.d.cfg.Source || m.Row.Replay {
		return nil
	}
	at := m.At.Add(w.ahead)
	n, own := w.ours(m)
	if !w.broken.IsZero() && w.first.IsZero() && at.After(w.broken) {
		w.first = at
	}
	if own {
		w.own[m.Row] = n
		if _, again := w.stored[n]; !again {
			w.stored[n] = at
		}
	}
	return nil
}

func (w *watch) ours(m jetstream.Received) (n int, own bool) {
	if m.Type != EventType {
		return 0, false
	}
	return w.d.load.read(m.Payload)
}

func (w *watch) injected(at time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.broken = at
}

// count is how many of the drill's events were stored.
func (w *watch) count() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.stored)
}

func (w *watch) position() uint64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.next
}

// reach waits until it has seen a message.
func (w *watch) reach(ctx context.Context, seq uint64) error {
	for w.position() <= seq {
		if !sleep.For(ctx, 50*time.Millisecond) {
			w.mu.Lock()
			defer w.mu.Unlock()
			return errors.Join(ctx.Err(), w.err)
		}
	}
	return nil
}
