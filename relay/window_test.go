package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestWindow: while JetStream is silent, as much is on its way as the window
// takes, in messages or in bytes, and no more.
func TestWindow(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name            string
		messages, bytes int
		metric          string
		least, most     float64
	}{
		{"messages", 100, 32 << 20, "walpost_inflight_messages", 100, 100},
		// A message is smaller than 4,000 bytes.
		{"bytes", 4096, 100_000, "walpost_inflight_bytes", 96_000, 100_000},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
			r.cfg.Window, r.cfg.WindowBytes = c.messages, c.bytes
			x := r.start().streaming()
			r.put(1, 1) // the first of a session goes alone
			r.pending(0)
			r.must(r.nats.Pause())
			r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
				SELECT 'order', 1, 'order.placed', jsonb_build_object('n', n, 'pad', repeat('x', 2000)) FROM generate_series(2, 300) n ORDER BY n`)
			eventually(t, "the window is full", func() bool { return x.metric(c.metric) >= c.least })
			r.pinned(r.here())
			if got := x.metric(c.metric); got > c.most {
				t.Errorf("%s is %.0f, want %.0f at most", c.metric, got, c.most)
			}
			r.must(r.nats.Resume())
			r.pending(0)
			r.storedIs(1, 300)
		})
	}
}
