package relay

import (
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
)

// stuckStarts is how many starts in a row end at one step for one reason before that is an alarm.
const stuckStarts = 3

// stuck counts them.
type stuck struct {
	step, reason string
	starts       int
}

// noticeStuck raises an alarm where starts get no further: the next one will not either. An outage
// is none of it, nor is what has an alarm of its own.
func (l *leader) noticeStuck(err error, f failure) {
	l.status.mu.Lock()
	step := l.status.step
	l.status.mu.Unlock()
	now := stuck{step: step, reason: f.reason}
	switch {
	case step == "" || step == settleStep: // the session had begun
		l.past.stuck = stuck{}
		return
	case f.passes:
		return
	}
	if before := l.past.stuck; before.step == now.step && before.reason == now.reason {
		now.starts = before.starts
	}
	now.starts++
	l.past.stuck = now
	if now.starts >= stuckStarts && !l.limited("no_progress", 10*time.Minute) {
		l.alarm(alarm.NoProgress,
			append(why(err), zap.String("step", step), zap.Int("starts", now.starts))...)
	}
}

// settleStep is the last step of a session that had begun.
const settleStep = "settle what was sent"
