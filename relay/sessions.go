package relay

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/walpost/walpost/internal/hint"
)

// SessionStatus is one attempt to deliver, or several in a row that failed alike before they delivered.
type SessionStatus struct {
	Started time.Time  `json:"started"`
	Ended   *time.Time `json:"ended"`
	// Mode is "stream" or "poll", and empty before it is known.
	Mode            string     `json:"mode"`
	DeliveringSince *time.Time `json:"delivering_since"`
	// Reason is the label of walpost_sessions_total, and Error what ended the session; empty while it runs.
	Reason string `json:"reason"`
	Error  string `json:"error"`
	Hint   string `json:"hint"`
	// Stored is the number of PubAcks.
	Stored int64 `json:"stored"`
	// Attempts is how many sessions there were.
	Attempts int `json:"attempts"`

	acks *atomic.Int64 // of the publisher that runs; nil without one
}

const (
	// mostSessions is how many are remembered, the present one among them.
	mostSessions = 20
	// mostReason bounds the text of an error, in bytes: it may quote a server.
	mostReason = 2 << 10
)

// count takes over what the publisher has stored.
func (s *SessionStatus) count() {
	if s.acks != nil {
		s.Stored += s.acks.Load()
		s.acks = nil
	}
}

// session is the present one, nil where none runs. The caller has mu.
func (s *status) session() *SessionStatus {
	if n := len(s.sessions); n > 0 && s.sessions[n-1].Ended == nil {
		return s.sessions[n-1]
	}
	return nil
}

// beginSession remembers that one begins.
func (s *status) beginSession() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.sessions); n >= mostSessions {
		s.sessions = slices.Delete(s.sessions, 0, n-mostSessions+1)
	}
	s.sessions = append(s.sessions, &SessionStatus{Started: time.Now().UTC(), Attempts: 1})
}

// runsAs notes the mode, and where the PubAcks are counted.
func (s *status) runsAs(mode string, acks *atomic.Int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := s.session(); now != nil {
		now.count()
		now.Mode, now.acks = mode, acks
	}
}

// errStopped ends the session of a relay that is stopped.
var errStopped = errors.New("the relay was stopped")

// endSession notes why the present session has ended. One that finds the slot in use is no session: the
// relay stands by, and looks again at once.
func (s *status) endSession(why error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.session()
	if now == nil {
		return
	}
	f := failureOf(atSessionEnd, why)
	if f.outcome == standBy {
		s.sessions = s.sessions[:len(s.sessions)-1]
		return
	}
	now.count()
	ended := time.Now().UTC()
	now.Ended, now.Reason, now.Hint = &ended, f.reason, hint.OneLine(hint.Of(why))
	now.Error = hint.OneLine(fmt.Sprint(why))
	now.Error = now.Error[:min(len(now.Error), mostReason)]
	if n := len(s.sessions); n > 1 && now.like(s.sessions[n-2]) {
		before := s.sessions[n-2]
		before.Ended, before.Attempts = now.Ended, before.Attempts+1
		s.sessions = s.sessions[:n-1]
	}
}

// like reports whether two sessions failed alike, and neither delivered anything.
func (s *SessionStatus) like(before *SessionStatus) bool {
	return s.DeliveringSince == nil && before.DeliveringSince == nil && s.Stored+before.Stored == 0 &&
		s.Reason == before.Reason && s.Error == before.Error
}

// lastSessions are copies, the newest first. The caller has mu.
func (s *status) lastSessions() []SessionStatus {
	all := make([]SessionStatus, 0, len(s.sessions))
	for _, one := range slices.Backward(s.sessions) {
		now := *one
		now.count()
		all = append(all, now)
	}
	return all
}
