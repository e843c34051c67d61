package relay_test

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
)

// TestStreamIsEditedUnderARunningRelay into one that a start refuses: the operator is told, as with a table,
// and the relay goes on when that is undone.
func TestStreamIsEditedUnderARunningRelay(t *testing.T) {
	for name, edit := range map[string]func(*jetstream.StreamConfig){
		"no ack":            func(c *jetstream.StreamConfig) { c.NoAck = true },
		"per-subject limit": func(c *jetstream.StreamConfig) { c.MaxMsgsPerSubject = 1 },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			x := r.start().streaming()
			r.put(1, 3)
			r.pending(0)
			s, err := r.js().Stream(t.Context(), "EVENTS")
			r.must(err)
			c := s.CachedInfo().Config
			edited := c
			edit(&edited)
			_, err = r.js().UpdateStream(t.Context(), edited)
			r.must(err)
			r.put(4, 6)
			x.alarmed("stream_unfit")
			_, err = r.js().UpdateStream(t.Context(), c)
			r.must(err)
			r.put(7, 9)
			r.pending(0)
		})
	}
}
