package relay

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/stream"
)

// unanswered means that the slot may be past rows whose records were lost.
type unanswered struct{ stream.System }

func (*unanswered) Error() string { return "the tables are to be answered before the WAL is read" }

// mayLackRecords reports whether the slot may have come with a promotion. The standby can
// have had the rows that it is past, and not their records, which were committed later.
func (s *session) mayLackRecords(sys stream.System) bool {
	return sys.Timeline > 1 && s.recovered.tail.Timeline != sys.Timeline &&
		s.past.answered != sys.Timeline
}

// answerFirst delivers or records, in the order of the tables, everything that is pending. Its
// messages carry the timeline of the tail, or the one before the server's, as all that are sent while no
// WAL is read: a start after a crash on the way finds the old one, and begins again.
func (l *leader) answerFirst(ctx, held context.Context, db *table.DB, sys stream.System) error {
	l.log.Info("the server has been promoted since the newest message: "+
		"the tables are answered before its WAL is read",
		zap.Uint32("timeline", sys.Timeline))
	answered := false
	err := l.newSession(db).polled(ctx, held, sys, func(ctx context.Context, s *session) error {
		const step = "deliver what was written before the promotion"
		if err := s.poller.Answer(ctx, step, s.outboxes...); err != nil {
			return err
		}
		answered = true
		return fmt.Errorf("%w: the tables have delivered what the promoted server had", errModeChanged)
	})
	if answered {
		l.past.answered = sys.Timeline
	}
	return err
}
