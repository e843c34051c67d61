package jetstream

import (
	"context"
	"time"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
)

const (
	// confirmPause is the time between two questions of Confirm, which gives up after
	// confirmPatience: a leader hears from its replicas once a second.
	confirmPause    = 100 * time.Millisecond
	confirmPatience = 5 * time.Second
)

// Confirm fails unless the stream has a leader that most of its replicas follow now, and
// returns the stream as it is then. A leader that was cut off, or deposed, answers for some
// seconds more, and does not know what the next one has stored; a replica that knows no
// leader may answer for itself.
func (s *Stream) Confirm(ctx context.Context) (*StreamInfo, error) {
	for begun := time.Now(); ; {
		asked := time.Now()
		info, err := s.Info(ctx)
		if err != nil {
			return nil, err
		}
		followers := 0
		for _, p := range info.Replicas {
			// It has answered the leader since Confirm was called. 0 means that it never has.
			if !p.Offline && p.Active > 0 && p.Active < asked.Sub(begun) {
				followers++
			}
		}
		most := len(info.Replicas)/2 + len(info.Replicas)%2
		if followers >= most && (info.Leader != "" || info.Config.Replicas < 2) {
			return info, nil
		}
		if time.Since(begun) > confirmPatience {
			return nil, hint.Errorf("see that the servers of the stream's replicas are up "+
				"and reach each other: nats stream cluster info "+s.cfg.Name,
				"read stream %s: its leader %q has heard from %d of %d other replicas within %s",
				s.cfg.Name, info.Leader, followers, len(info.Replicas), confirmPatience)
		}
		if !sleep.For(ctx, confirmPause) {
			return nil, ctx.Err()
		}
	}
}
