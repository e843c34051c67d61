package fallback

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Heal delivers what is recorded and may be sent, in its order, and nothing else: it comes before the WAL
// is read. lost says that the stream has lost rows: those of a table that cannot record them are delivered,
// too.
func (l *Poller) Heal(ctx context.Context, lost bool) error {
	l.healing, l.lost = true, lost
	defer func() { l.healing = false }()
	for {
		more, err := l.passes(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		switch {
		case err != nil:
			if err := l.recover(ctx, err); err != nil || !l.lost {
				return err
			}
			sleep.For(ctx, time.Second) // lost rows come first
		case !more && l.unmarked():
			sleep.For(ctx, 20*time.Millisecond)
		case !more:
			return nil // locked rows keep their aggregates held, and no other row waiting
		}
	}
}

// heals reports whether rows without a record are delivered before the WAL is read:
// where no record can say which of them the stream has lost.
func (l *Poller) heals(t *outbox.Table) bool { return l.lost && !t.Layout.Records() }

// unmarked reports whether rows of such a table are in the publisher. The WAL is about to
// bring them, and the table would still show them as pending.
func (l *Poller) unmarked() (has bool) {
	l.publisher.Unreleased(func(ref outbox.Ref) { has = has || l.heals(ref.Table) })
	return has
}

// Answer waits until every row of some tables is answered that is pending when it is called, or written by a
// transaction that is open then: delivered, or found delayed, parked or held. step says what for. The poller
// must be running.
func (l *Poller) Answer(ctx context.Context, step string, tables ...*outbox.Table) error {
	db, err := open(ctx, l.cfg.Database) // the poller's own is at work
	if err != nil {
		return err
	}
	defer db.Close()
	xid, err := db.NewXID(ctx)
	if err != nil {
		return err
	}
	for _, t := range tables {
		backlog := l.backlog(t)
		err := l.awaitNone(ctx, t, step, func() (left string, err error) {
			// A transaction that is flushed is not visible before it has ended, which a synchronous standby
			// may put off.
			if ended, err := db.EndedBefore(ctx, xid); err != nil || !ended {
				return "an open transaction", err
			}
			return backlog.Left(ctx, db)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func (l *Poller) backlog(t *outbox.Table) *table.Backlog {
	return &table.Backlog{Table: t, Threshold: l.cfg.DelayThreshold}
}

// Settle waits until every row that is committed when it is called, and is due, is delivered or recorded. A
// recorded row that may be tried is tried once. The poller must be running.
func (l *Poller) Settle(ctx context.Context) error {
	db, err := open(ctx, l.cfg.Database) // the poller's own is at work
	if err != nil {
		return err
	}
	defer db.Close()
	begun, err := db.Now(ctx)
	if err != nil {
		return err
	}
	for _, t := range l.cfg.Outboxes {
		backlog := l.backlog(t)
		err := l.awaitNone(ctx, t, "deliver what is pending", func() (left string, err error) {
			if left, err = backlog.Left(ctx, db); err != nil || left != "" {
				return left, err
			}
			return db.TriableBefore(ctx, t, l.cfg.OnPoison != Skip, begun)
		})
		if err != nil {
			return err
		}
		l.advanceNow(ctx, db, t)
	}
	return nil
}

// advanceNow moves a table's progress on at once. The passes do so from one to a later one, and a relay that
// ends after the first would never do it.
func (l *Poller) advanceNow(ctx context.Context, db *table.DB, t *outbox.Table) {
	var a table.Advance
	for range 2 { // the first sees how far, the second goes there
		err := db.Search(ctx, func(ctx context.Context) error { return db.Advance(ctx, t, &a) })
		if err != nil {
			l.reporter.Trouble("the journal's progress does not move: the next run tries again", err)
			return
		}
		if a.Whole != nil {
			l.reporter.Searched(t, *a.Whole)
		}
	}
}

// awaitNone waits until no row is left.
func (l *Poller) awaitNone(
	ctx context.Context, t *outbox.Table, step string, look func() (left string, err error),
) error {
	for begun, pause := time.Now(), 50*time.Millisecond; ; pause = min(pause+pause/8, time.Second) {
		left, err := look()
		switch {
		case err == nil && left == "":
			return nil // rows of the table that come now are not asked for
		case err == nil:
			l.reporter.Meanwhile(fmt.Sprintf("%s: waiting for %s of %s", step, left, t), begun)
			if time.Since(begun) > time.Minute && !l.reporter.Limited(step+"/"+t.String(), 10*time.Minute) {
				l.log.Info("still waiting", zap.String("to", step), zap.String("for", left),
					zap.String("table", t.String()), zap.Duration("since", time.Since(begun)))
			}
		case table.IsTemporary(err):
			l.reporter.Meanwhile(step, begun)
			l.reporter.Trouble("pending rows cannot be looked for: trying again", err,
				zap.String("table", t.String()))
		default:
			return err
		}
		l.Nudge()
		if !sleep.For(ctx, pause) {
			return context.Cause(ctx)
		}
	}
}
