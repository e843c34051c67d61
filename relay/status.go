package relay

import (
	"errors"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/outbox"
)

type state string

const (
	stateStarting  state = "starting"
	stateStandby   state = "standby"
	stateStreaming state = "streaming"
	statePolling   state = "polling"
	stateWaiting   state = "waiting" // for PostgreSQL or JetStream, or between two sessions
	stateStopped   state = "stopped"
)

// status is what the relay says of itself.
type status struct {
	mu    sync.Mutex // guards what follows
	state state
	since time.Time
	err   error
}

func (s *status) set(to state, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state != to {
		s.since = time.Now()
	}
	s.state, s.err = to, err
}

// Status is a snapshot for operators.
type Status struct {
	State     string    `json:"state"`
	Since     time.Time `json:"since"`
	LastError string    `json:"last_error,omitempty"`
	Slot      string    `json:"slot"`
	Stream    string    `json:"stream"`
	Inflight  int       `json:"inflight_messages"`
	Unsettled uint64    `json:"unsettled_rows"`
}

// Status reads what the relay is doing now.
func (r *Relay) Status() Status {
	r.status.mu.Lock()
	s := Status{State: string(r.status.state), Since: r.status.since, Slot: r.cfg.Slot, Stream: r.cfg.Stream.Name}
	if r.status.err != nil {
		s.LastError = r.status.err.Error()
	}
	r.status.mu.Unlock()
	if lane := r.lane.Load(); lane != nil {
		c := lane.Counts()
		s.Inflight, s.Unsettled = c.Inflight, c.Unsettled
	}
	return s
}

// Ready is nil while the relay streams or polls, or stands by for one that does.
func (r *Relay) Ready() error {
	s := r.Status()
	switch state(s.State) {
	case stateStreaming, statePolling, stateStandby:
		return nil
	}
	if s.LastError != "" {
		return errors.New(s.State + ": " + s.LastError)
	}
	return errors.New(s.State)
}

// alarm is something that an operator must know of, whatever happens next.
func (r *Relay) alarm(name, message string, fields ...zap.Field) {
	r.metrics.alarms.WithLabelValues(name).Inc()
	r.log.Error(message, append(fields, zap.String("alarm", name))...)
}

// trouble logs a failure that is retried, at most once in ten seconds.
func (r *Relay) trouble(message string, err error, fields ...zap.Field) {
	if !r.limited(message, 10*time.Second) {
		r.log.Warn(message, append(fields, zap.Error(err))...)
	}
}

// limited reports whether something of the kind was said less than the given
// time ago; if not, it counts as said now. Kinds are few.
func (r *Relay) limited(kind string, every time.Duration) bool {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	if last, said := r.said[kind]; said && time.Since(last) < every {
		return true
	}
	r.said[kind] = time.Now()
	return false
}

func zapTable(t *outbox.Table) zap.Field { return zap.Stringer("table", t) }
