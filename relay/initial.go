package relay

import (
	"context"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
)

// initialLimit is how many pending rows a first start publishes without being told
// to.
const initialLimit = 100_000

// checkInitial asks, before anything is changed, what a first start shall do with
// a great many rows.
func (s *starter) checkInitial(ctx context.Context, db *table.DB, streams, newStream bool) error {
	switch s.cfg.Initial {
	case "pending":
		return nil
	case "none":
		if streams {
			return nil
		}
		return s.refuseToPublish(ctx, db, newStream)
	}
	has, err := db.HasSlot(ctx) // first: the tables may be locked
	if err != nil {
		return err
	}
	if has {
		return nil
	}
	for _, t := range s.cfg.Outboxes {
		n, err := db.PendingCount(ctx, t, initialLimit+1)
		if err != nil {
			return err
		}
		if n <= initialLimit {
			continue
		}
		first, err := s.isFirst(ctx, db, newStream)
		if err != nil || !first {
			return err
		}
		return hint.Coded("table-initial",
			hint.Errorf("set postgres.initial to pending to publish them all, or to none to mark them as "+
				"processed without publishing them",
				"table %s has more than %d pending rows at this first start: postgres.initial must say what "+
					"becomes of them", t, initialLimit))
	}
	return nil
}

// refuseToPublish ends a first start that is to publish nothing of what is pending, and cannot read the
// WAL: the tables would be polled, and all of it published.
func (s *servers) refuseToPublish(ctx context.Context, db *table.DB, newStream bool) error {
	first, err := s.isFirst(ctx, db, newStream)
	if err != nil || !first {
		return err
	}
	return hint.Coded("table-initial", hint.Errorf(
		"mark the rows that shall not be published yourself, and leave postgres.initial out",
		"postgres.initial none needs the WAL: only its slot tells a first start from a later one"))
}

// isFirst reports whether no relay was here before: there is no slot, no mark, and
// no message of this source.
func (s *servers) isFirst(ctx context.Context, db *table.DB, newStream bool) (bool, error) {
	if has, err := db.HasSlot(ctx); err != nil || has {
		return false, err
	}
	left, err := s.hasLeftTraces(ctx, db, newStream)
	return !left && err == nil, err
}

// hasLeftTraces reports whether a relay has delivered anything: there is a mark, or a message of
// this source.
func (s *servers) hasLeftTraces(ctx context.Context, db *table.DB, newStream bool) (bool, error) {
	for _, t := range s.cfg.Outboxes {
		if marked, err := db.HasMarks(ctx, t); err != nil || marked {
			return marked, err
		}
	}
	if newStream {
		return false, nil
	}
	return s.hasSent(ctx)
}

// hasSent reports whether the stream holds a message of this source.
func (s *servers) hasSent(ctx context.Context) (bool, error) {
	info, err := s.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	found, err := s.stream.ScanBackward(ctx, info.FirstSeq, info.LastSeq, jetstream.ScanOptions{
		Source: s.envelope.Source(), Step: func([]jetstream.Message) (bool, error) { return false, nil },
	})
	return found.Own > 0, err
}

// skipInitial marks the rows that are pending before a first start (postgres.initial: none).
// The relay that holds the lock calls it once, before it creates the slot.
func (l *leader) skipInitial(ctx context.Context, db *table.DB) error {
	if l.cfg.Initial != "none" || l.past.begun {
		return nil
	}
	first, err := l.isFirst(ctx, db, false)
	if err != nil || !first {
		l.past.begun = err == nil
		return err
	}
	l.status.own()
	l.status.do("mark what was pending before the first start")
	skipped, err := table.SkipPending(ctx, l.cfg.database(), l.cfg.Outboxes)
	if err != nil {
		return err
	}
	for i, n := range skipped {
		if n > 0 {
			l.log.Warn("marked the rows that were pending before the first start, without publishing them "+
				"(postgres.initial: none)",
				zapTable(l.cfg.Outboxes[i]), zap.Int64("rows", n))
		}
	}
	l.past.begun = true
	return nil
}
