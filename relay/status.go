package relay

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/retention"
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
	// step is what a session does that does not deliver yet, or no more, or that makes the
	// slot while the tables are polled.
	step   string
	stepAt time.Time
	replay *ReplayStatus // that is being fulfilled
	aside  []SetAside
	kept   []retention.Kept
	// sessions are the last ones, oldest first.
	sessions []*SessionStatus
}

// ReplayStatus is a request for rows to be published again that the relay works on.
type ReplayStatus struct {
	ID       int64  `json:"replay_id"`
	Outbox   string `json:"outbox"`
	ToStream string `json:"to_stream,omitempty"`
	Sent     int64  `json:"sent"`
	Refused  int64  `json:"refused"`
	Total    *int64 `json:"total"` // null where the rows were not counted
}

// SetAside is an outbox that is not delivered, while the others of its relay are. Its rows stay in the table.
type SetAside struct {
	Outbox  string `json:"outbox"`
	Because string `json:"because"`
	Hint    string `json:"hint"`
}

// setAside notes the outboxes that are not delivered from now on.
func (s *status) setAside(aside []SetAside) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.aside = aside
}

// replaying notes the request that is being fulfilled, nil where none is.
func (s *status) replaying(replay *ReplayStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.replay = replay
}

// keeping notes the partitions that the last pass of retention has not dropped.
func (s *status) keeping(kept []retention.Kept) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.kept = kept
}

func (s *status) set(to state, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.become(to)
	s.err, s.step = err, ""
}

func (s *status) become(to state) {
	if s.state != to {
		s.since = time.Now()
	}
	s.state = to
}

// deliver begins a time of delivering, unless the session is over already.
func (s *status) deliver(ctx context.Context, to state) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ctx.Err() == nil {
		s.become(to)
		s.err, s.step = nil, ""
		if session := s.session(); session != nil && session.DeliveringSince == nil {
			at := time.Now().UTC()
			session.DeliveringSince = &at
		}
	}
}

// failing notes what keeps the present step from being done, nil where nothing does.
func (s *status) failing(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = err
}

// own ends a standby.
func (s *status) own() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == stateStandby {
		s.become(stateWaiting)
	}
}

// do notes a step between two times of delivering.
func (s *status) do(step string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == stateStreaming || s.state == statePolling {
		s.become(stateWaiting)
		s.err = nil
	}
	s.step, s.stepAt = step, time.Now()
}

// meanwhile notes what is done since then while the tables are polled.
func (s *status) meanwhile(step string, since time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state == statePolling {
		s.step, s.stepAt, s.err = step, since, nil
	}
}

// interrupt ends a time of delivering with a step, where there is one.
func (s *status) interrupt(step string) (delivered bool) {
	s.mu.Lock()
	delivered = s.state == stateStreaming || s.state == statePolling
	s.mu.Unlock()
	if delivered {
		s.do(step)
	}
	return delivered
}

// read is the part of a snapshot that it knows.
func (s *status) read() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := Status{
		State: string(s.state), Since: s.since, Step: s.step, Replay: s.replay,
		SetAside: s.aside, Kept: s.kept,
	}
	now.Sessions = s.lastSessions()
	if s.err != nil {
		now.LastError = s.err.Error()
	}
	return now
}

// Status is a snapshot for operators.
type Status struct {
	State     string    `json:"state"`
	Since     time.Time `json:"since"`
	Step      string    `json:"step,omitempty"` // while nothing is delivered, and while the slot is made
	LastError string    `json:"last_error,omitempty"`
	Slot      string    `json:"slot"`
	Stream    string    `json:"stream"`
	Postgres  pg.Met    `json:"postgres"` // the term's server, or the last one's
	Inflight  int       `json:"inflight_messages"`
	Unsettled uint64    `json:"unsettled_rows"`
	// Replay is the replay that the relay works on.
	Replay *ReplayStatus `json:"replay,omitempty"`
	// SetAside are outboxes that do not fit, or about which a question is open.
	SetAside []SetAside `json:"set_aside,omitempty"`
	// Kept are partitions that the last pass of retention has not dropped because of rows that no relay has
	// delivered.
	Kept []retention.Kept `json:"kept_partitions,omitempty"`
	// Sessions are the last 20, the newest first.
	Sessions []SessionStatus `json:"sessions"`
}

// Status reads what the relay is doing now.
func (r *Relay) Status() Status {
	s := r.status.read()
	s.Slot, s.Stream = r.cfg.Slot, r.cfg.Stream.Name
	s.Postgres = r.servers.one.Load().Met()
	c := r.current.Load().counts()
	s.Inflight, s.Unsettled = c.Inflight, c.Unreleased
	return s
}

// Ready is nil while the relay streams or polls an outbox, or stands by for one that does.
func (r *Relay) Ready() error {
	s := r.Status()
	text := s.State
	switch state(s.State) {
	case stateStandby:
		return nil
	case stateStreaming, statePolling:
		if len(s.SetAside) == 0 || len(s.SetAside) < len(r.cfg.Outboxes) {
			return nil
		}
		text = "every outbox is set aside: " + s.SetAside[0].Because
	}
	for _, more := range []string{s.Step, s.LastError} {
		if more != "" {
			text += ": " + more
		}
	}
	return errors.New(text)
}
