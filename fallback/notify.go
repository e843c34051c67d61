package fallback

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
)

// listenCheck is how often a relay that polls looks whether inserts are announced.
const listenCheck = 2 * time.Second

// Listen has the poller make a pass whenever inserts are announced, until ctx is done. It asks db whether
// they are, in every table, and listens on another connection while they are.
func (l *Poller) Listen(ctx context.Context, db *table.DB) {
	for sleep.For(ctx, listenCheck) { // and not at once: it may poll only until it has a slot
		all, err := db.Announced(ctx, l.cfg.Outboxes)
		if err == nil && all {
			err = l.listenOnce(ctx)
		}
		if err != nil && ctx.Err() == nil {
			l.reporter.Trouble("cannot listen for inserts: polling", err)
		}
	}
}

// listenOnce returns when inserts are not announced any more, or cannot be heard.
func (l *Poller) listenOnce(ctx context.Context) error {
	on, err := table.Listen(ctx, l.cfg.Database)
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
			l.log.Warn("inserts are not announced any more: polling", zap.Duration("every", pollInterval))
			return nil
		}
		if l.setAnnounced(true) {
			l.log.Info("inserts are announced: the tables are searched when rows come",
				zap.Duration("and_every", l.interval()))
		}
		for check := time.Now().Add(listenCheck); time.Now().Before(check); {
			heard, err := on.Wait(ctx, time.Until(check))
			if err != nil {
				return err
			}
			if heard {
				l.Nudge()
			}
		}
	}
}

// setAnnounced changes the poller's interval. Either way there may be rows that
// nobody has announced.
func (l *Poller) setAnnounced(on bool) (changed bool) {
	changed = l.announced.Swap(on) != on
	if changed {
		l.Nudge()
	}
	return changed
}
