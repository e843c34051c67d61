package relay

import (
	"context"
	"time"
)

// starter makes a start: it checks both servers and fills in what is known of them afterwards. It runs on
// Run's goroutine before the first term; its handlers of NATS events run on the connection's.
type starter struct {
	*reporter
	*servers
	giveUp func(error)          // ends Run
	deny   func(subject string) // tells the current session that it may not publish there

	created time.Time // of the stream; zero where this start has made it
}

// begin prepares, and waits for servers that are away. It fails with what somebody has to put right.
func (s *starter) begin(ctx context.Context) error {
	s.status.set(stateStarting, nil)
	b := backoff{least: 100 * time.Millisecond, most: 5 * time.Second}
	said := ""
	for {
		err := s.prepare(ctx)
		s.failing(err)
		if err == nil && said != "" {
			s.log.Info("the servers are there, the start goes on")
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if err == nil || failureOf(atStart, err).outcome == refuseStart {
			return err
		}
		if text := err.Error(); text != said || !s.limited("start", time.Minute) {
			s.limited("start", 0)
			s.log.Warn("start waits for a server, and tries again", why(err)...)
			said = text
		}
		b.wait(ctx)
	}
}
