package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
)

// errDelivered ends a relay that runs once.
var errDelivered = errors.New("everything that was committed before the start is settled")

// oncePatience is how long a relay that runs once tries again without having stored or recorded anything. A
// variable for tests.
var oncePatience = 30 * time.Second

// lockPatience is how long the server may take to notice that the lock's last holder has ended.
const lockPatience = 2 * time.Second

// once ends a relay that runs once. It is nil in any other relay. One goroutine at a time calls its methods:
// the leader's, or the one for which the leader's waits.
type once struct {
	end   context.CancelCauseFunc // ends Run; set by Run
	since time.Time               // of the first failure after the last advance
}

// failed ends the relay where it has tried for long enough. A nil error changes nothing: it may be one of
// several steps that goes well each time.
func (o *once) failed(err error) {
	if o == nil || err == nil {
		return
	}
	if o.since.IsZero() {
		o.since = time.Now()
	}
	if time.Since(o.since) > oncePatience {
		o.end(fmt.Errorf("nothing could be delivered for %s: %w", oncePatience, err))
	}
}

// advanced: something was stored or recorded.
func (o *once) advanced() {
	if o != nil {
		o.since = time.Time{}
	}
}

// interrupted is the error of a relay that was to run once, and was ended before.
func (o *once) interrupted() error {
	if o == nil {
		return nil
	}
	return hint.Errorf("run it again: the next run goes on from there",
		"it was interrupted: not everything that was pending is delivered")
}

// endOnce ends the relay when everything is settled that is committed when it is called. It returns why the
// session has to end before that.
func (s *session) endOnce(ctx context.Context) error {
	if s.wal != nil {
		if err := s.awaitSettled(ctx); err != nil {
			return err
		}
	}
	if err := s.poller.Settle(ctx); err != nil { // rows that the WAL does not bring
		return err
	}
	s.once.end(errDelivered)
	return nil
}

// awaitSettled waits until every row that the WAL has by now is settled.
func (s *session) awaitSettled(ctx context.Context) error {
	lsn, err := s.db.InsertLSN(ctx)
	if err != nil {
		return err
	}
	if err := s.db.Flush(ctx); err != nil {
		return err
	}
	for s.wal.Tracker().Confirmed() < lsn {
		if !sleep.For(ctx, 10*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
	return nil
}

// lockedError names the relay that holds the lock.
func (l *leader) lockedError(ctx context.Context, db *table.DB) error {
	if differs, err := db.HolderDiffers(ctx); err == nil && differs {
		return l.errSlotShared()
	}
	who := "another relay"
	if holder, err := db.LockHolder(ctx); err == nil && holder != nil {
		who = holder.String()
	}
	return hint.Errorf("that relay delivers what is pending; stop it to run once",
		"a relay holds the lock of this slot: %s", who)
}

// stillAside is the error of a relay that has run once without an outbox that is set aside.
func (s *servers) stillAside() error {
	if len(s.aside) == 0 {
		return nil
	}
	a := s.aside[0]
	return hint.Errorf(a.Hint, "outbox %s is set aside: %s", a.Outbox, a.Because)
}

// mostCounted bounds what the last line counts of each table.
const mostCounted = 100_000

// sayDelivered writes the last line.
func (r *Relay) sayDelivered(ctx context.Context) {
	fields := []zap.Field{zap.Int64("delivered", r.leader.past.stored)}
	waiting, slot, err := r.countWaiting(ctx)
	if err != nil {
		r.log.Warn("cannot count the rows that wait", why(err)...)
	} else {
		fields = append(fields, waiting...)
	}
	if slot {
		fields = append(fields, zap.String("slot", r.cfg.Slot), zap.String("hint",
			"until the next run the slot keeps WAL on the server: `walpost slot drop` drops it"))
	}
	r.log.Info("delivered what was pending", fields...)
}

// countWaiting counts the rows that a relay that runs once leaves in the tables.
func (r *Relay) countWaiting(ctx context.Context) (counts []zap.Field, slot bool, err error) {
	db, err := table.Open(ctx, r.cfg.database())
	if err != nil {
		return nil, false, err
	}
	defer db.Close()
	if slot, err = db.HasSlot(ctx); err != nil {
		return nil, false, err
	}
	var parked, held, delayed int
	for _, t := range r.outboxes {
		if t.Layout.Records() {
			p, h, err := db.RecordedCount(ctx, t, mostCounted)
			if err != nil {
				return nil, slot, err
			}
			parked, held = parked+p, held+h
		}
		d, err := db.DelayedCount(ctx, t, mostCounted)
		if err != nil {
			return nil, slot, err
		}
		delayed += d
	}
	return []zap.Field{
		zap.Int("parked", parked), zap.Int("held", held), zap.Int("delayed", delayed),
	}, slot, nil
}
