package relay

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
)

// TestComplaintsAreFew: a privilege that is lacking for ever is no reason to shout
// at every pass.
func TestComplaintsAreFew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		core, logs := observer.New(zap.DebugLevel)
		r := &retainer{reporter: newReporter(zap.New(core), nil)}
		denied := errors.Join(nil, errors.New("permission denied"))
		steps := []struct {
			after time.Duration
			notes []string
			err   error
			said  int
		}{
			{0, nil, nil, 0},
			{0, nil, denied, 1},
			{30 * time.Minute, []string{"something else"}, nil, 1},
			{29 * time.Minute, nil, denied, 1},
			{time.Minute, nil, denied, 1}, // as before
			{20 * time.Hour, nil, nil, 1},
			{0, nil, denied, 1},
			{0, []string{"a note"}, denied, 2},
			{23 * time.Hour, []string{"a note"}, denied, 2},
			{time.Hour, []string{"a note"}, denied, 3},
		}
		for i, s := range steps {
			time.Sleep(s.after)
			if r.report(s.notes, s.err); logs.Len() != s.said {
				t.Fatalf("step %d: %d complaints, want %d", i, logs.Len(), s.said)
			}
		}
	})
}
