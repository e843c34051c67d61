package relay

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/table"
)

// listenCheck is how often a relay that polls looks whether inserts are announced.
const listenCheck = 2 * time.Second

// listen has the poller make a pass whenever inserts are announced, on a connection
// of its own. It has that connection only while they are, in every table; otherwise
// the poller goes on as if there were no such thing.
func listen(ctx context.Context, db *table.DB, l *poller) {
	for sleep(ctx, listenCheck) { // and not at once: it may poll only until it has a slot
		all, err := db.Announced(ctx, l.cfg.Outboxes)
		if err == nil && all {
			err = listenOnce(ctx, l)
		}
		if err != nil && ctx.Err() == nil {
			l.reporter.trouble("cannot listen for inserts: polling", err)
		}
	}
}

// listenOnce returns when inserts are not announced any more, or cannot be heard.
func listenOnce(ctx context.Context, l *poller) error {
	on, err := table.Listen(ctx, l.cfg.database())
	if err != nil {
		return err
	}
	defer on.Close()
	defer l.setAnnounced(false)
	for {
		all, err := on.Announced(ctx, l.cfg.Outboxes)
		if err != nil {
			return err
		}
		if !all {
			l.reporter.log.Warn("inserts are not announced any more: polling", zap.Duration("every", pollInterval))
			return nil
		}
		if l.setAnnounced(true) {
			l.reporter.log.Info("inserts are announced: the tables are searched when rows come", zap.Duration("and_every", l.interval()))
		}
		for check := time.Now().Add(listenCheck); time.Now().Before(check); {
			heard, err := on.Wait(ctx, time.Until(check))
			if err != nil {
				return err
			}
			if heard {
				l.nudge()
			}
		}
	}
}

// setAnnounced changes the poller's interval. Either way there may be rows that
// nobody has announced.
func (l *poller) setAnnounced(on bool) (changed bool) {
	changed = l.announced.Swap(on) != on
	if changed {
		l.nudge()
	}
	return changed
}
