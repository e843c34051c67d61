package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/stream"
)

// Mode says where rows are read from.
type Mode string

const (
	// ModeAuto streams where the server and the role allow it, and polls elsewhere.
	ModeAuto Mode = "auto"
	// ModeStream fails where it cannot stream.
	ModeStream Mode = "stream"
	// ModePoll reads the tables only.
	ModePoll Mode = "poll"
)

// The label values of walpost_mode.
const (
	modeStream = "stream"
	modePoll   = "poll"
)

// errModeChanged ends a session, because the next one gets its rows another way.
var errModeChanged = errors.New("the mode changes")

// modeCheck is how often a relay that polls looks whether it could stream.
const modeCheck = 5 * time.Second

// session gets the rows in the best way that there is now, until something fails
// or another way opens up.
func (l *leader) session(ctx, held context.Context, db *table.DB) (err error) {
	if err := l.deliverAlone(ctx, db); err != nil {
		return err
	}
	l.status.do("look at the tables")
	if err := l.compareTables(ctx, l.reporter, db); err != nil {
		return err
	}
	defer func() { err = l.becauseOf(ctx, db, err) }()
	l.status.do("ask whether the WAL can be read")
	sys, why, err := l.mayStream(ctx, db)
	if err != nil {
		return err
	}
	if why != nil {
		if err := l.beginOutboxes(ctx, db); err != nil {
			return err
		}
		return l.pollOnly(ctx, held, db, sys, why)
	}
	l.status.do("look at the slot")
	slots, err := stream.OpenSlots(ctx, l.server())
	if err != nil {
		return err
	}
	defer slots.Close()
	if err := l.beginOutboxes(ctx, db); err != nil {
		return err
	}
	cause, err := l.judgeSlot(ctx, db, slots)
	if err != nil {
		return err
	}
	if cause == nil {
		slots.Close()
		err := l.newSession(db).streamed(ctx, held)
		var open *unanswered
		if errors.As(err, &open) {
			return l.answerFirst(ctx, held, db, open.System)
		}
		return err
	}
	return l.rebuild(ctx, held, db, slots, cause)
}

// mayStream reports why the WAL cannot be read, nil where it can; sys identifies
// the server where it cannot.
func (l *leader) mayStream(ctx context.Context, db *table.DB) (sys stream.System, why, err error) {
	if l.cfg.Mode == ModePoll {
		why = errModePoll
	} else if err = l.checkServer(ctx); err != nil {
		switch f := failureOf(atSlot, err); {
		case f.outcome == pollTables && l.cfg.Mode == ModeAuto:
			why, err = err, nil
		case f.outcome == recreateSlot: // judgeSlot says so again
			err = nil
		}
	}
	if err != nil || why == nil {
		return sys, nil, err
	}
	sys, err = identify(ctx, db)
	return sys, why, err
}

var errModePoll = errors.New("mode is poll")

// checkServer asks on new connections, as a session would.
func (s *servers) checkServer(ctx context.Context) error {
	db, err := table.Open(ctx, s.database())
	if err != nil {
		return err
	}
	defer db.Close()
	if err := stream.CheckServer(ctx, db.Conn(), s.cfg.Slot); err != nil {
		return err
	}
	_, err = stream.Probe(ctx, s.server(), s.cfg.Slot)
	return err
}

// pollOnly reads the tables for as long as the WAL cannot be read.
func (l *leader) pollOnly(ctx, held context.Context, db *table.DB, sys stream.System, why error) error {
	l.log.Warn("polling: the tables are searched instead of the WAL being read",
		zap.NamedError("because", why))
	left := l.slots.leave(ctx, db)
	return l.newSession(db).polled(ctx, held, sys, func(ctx context.Context, s *session) error {
		if l.cfg.Once {
			return s.endOnce(ctx)
		}
		for sleep.For(ctx, modeCheck) {
			if !left {
				left = l.slots.leave(ctx, db)
			}
			if at := l.past.batchesAt; !at.IsZero() && !time.Now().Before(at) {
				return errBatchesAgain
			}
			if _, why, err := l.mayStream(ctx, db); err == nil && why == nil {
				l.log.Info("the WAL can be read now")
				return fmt.Errorf("%w: the WAL can be read now", errModeChanged)
			}
		}
		return nil
	})
}

// judgeSlot reports why the slot has to be recreated, nil where it is of use.
func (l *leader) judgeSlot(ctx context.Context, db *table.DB, slots *stream.Slots) (cause, err error) {
	slot, err := slots.Read(ctx, l.cfg.Slot)
	switch {
	case err != nil && failureOf(atSlot, err).outcome == recreateSlot:
		return err, nil
	case err != nil:
		return nil, err
	case l.past.unusable != nil:
		return l.past.unusable, nil
	}
	return nil, l.sayAdopted(ctx, db, slot)
}

// sayAdopted tells once in a process's life that the slot may be another program's: nothing
// shows that a relay was here before.
func (l *leader) sayAdopted(ctx context.Context, db *table.DB, slot *stream.Slot) error {
	if l.past.judged || l.past.remembered {
		return nil
	}
	left, err := l.hasDelivered(ctx, db)
	switch {
	case err != nil && waitsOut(err):
		return nil // a locked table: the next session asks again
	case err != nil:
		return err
	}
	l.past.judged = true
	if !left {
		l.log.Info("using a slot that is there already, although no relay has delivered anything yet: if "+
			"another program has made it, give one of the two another name",
			zap.String("slot", slot.Name), zap.Stringer("confirmed_lsn", slot.ConfirmedFlush))
	}
	return nil
}

// hasDelivered reports whether a relay has delivered anything: there is a mark, or a message of this source.
func (s *servers) hasDelivered(ctx context.Context, db *table.DB) (bool, error) {
	for _, t := range s.outboxes {
		if marked, err := db.HasMarks(ctx, t); err != nil || marked {
			return marked, err
		}
	}
	return s.hasSent(ctx)
}

// rebuild recreates the slot without a gap: the new one is there before the
// tables are searched, and has its name only when every row that it may lack is
// answered. It ends in errModeChanged when that is done.
func (l *leader) rebuild(ctx, held context.Context, db *table.DB, slots *stream.Slots, cause error) error {
	missing := errors.Is(cause, stream.ErrNoSlot)
	again := l.past.remakes || !missing || l.hadSlot(ctx)
	switch {
	case errors.Is(cause, stream.ErrForeignSlot):
		l.slots.alarmForeign(cause)
	case missing && again && !l.past.remakes:
		l.log.Warn("the slot is gone: it is created again, and the tables deliver meanwhile",
			zap.String("slot", l.cfg.Slot))
	case !missing:
		l.alarm(alarm.SlotGivenUp, zap.Error(cause))
	}
	if err := l.slots.drop(ctx, db); err != nil {
		return err
	}
	l.past.unusable, l.past.unsendable, l.past.judged, l.past.remakes = nil, unsendable{}, true, again
	l.status.own()
	sys, err := slots.System(ctx)
	if err != nil {
		return err
	}
	slots.Close()
	began := time.Now()
	made := false
	err = l.newSession(db).polled(ctx, held, sys, func(ctx context.Context, s *session) error {
		if !l.makeSlot(ctx, db, s) {
			return nil
		}
		made = true
		l.metrics.slots.Inc()
		l.sayMade(again, time.Since(began), s.stored.Load())
		if again {
			return fmt.Errorf("%w: %v: it has been created again", errModeChanged, cause)
		}
		return fmt.Errorf("%w: the slot has been created", errModeChanged)
	})
	if made {
		l.past.answered, l.past.remakes = sys.Timeline, false
	}
	return err
}

// hadSlot reports whether a slot that is missing has been there: this process used it, or the newest messages
// of this source came from the WAL.
func (l *leader) hadSlot(ctx context.Context) bool {
	if l.past.judged {
		return true
	}
	streamed, err := l.hasStreamed(ctx)
	return streamed && err == nil // it only words the log
}

// sayMade ends what the log has said of the slot's creation.
func (l *leader) sayMade(again bool, took time.Duration, rows int64) {
	say, message := l.log.Info, "created the slot, and delivered the due rows from before it"
	if again {
		say = l.log.Warn
		message = "created the slot again, and delivered the due rows that the old one had not brought"
	}
	say(message, zap.String("slot", l.cfg.Slot), zap.Duration("took", took.Round(time.Millisecond)),
		zap.Int64("rows_from_tables", rows))
}

// makeSlot tries again until the slot is made; it reports false where ctx ends that.
func (l *leader) makeSlot(ctx context.Context, db *table.DB, s *session) bool {
	for {
		err := l.slots.makeAnswered(ctx, db, func(ctx context.Context) error {
			s.lookAtPublication(ctx)
			now, err := s.membership(ctx)
			if err != nil {
				return err
			}
			const step = "deliver what was written before the slot was made"
			if err := s.poller.Answer(ctx, step, s.outboxes...); err != nil {
				return err
			}
			sent := slices.Clone(s.noter.rows)
			for i := range sent {
				sent[i].PublishedAs = s.as(s.outbox(&sent[i]), now)
			}
			return db.NotePublished(ctx, sent)
		})
		if err == nil {
			return true
		}
		if ctx.Err() != nil {
			return false
		}
		if !l.limited("slot_not_made", time.Minute) {
			l.alarm(alarm.SlotNotMade, append(why(err), zap.String("slot", l.cfg.Slot))...)
		}
		l.status.meanwhile("wait before the slot is made again", time.Now())
		l.failing(err)
		sleep.For(ctx, modeCheck)
	}
}
