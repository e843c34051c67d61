package relay

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
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

// OnPoison says what a failed row does to the later rows of its aggregate.
type OnPoison string

const (
	// Hold keeps them waiting.
	Hold OnPoison = "hold"
	// Skip lets them pass.
	Skip OnPoison = "skip"
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
func (r *Relay) session(ctx, held context.Context, db *fallback.DB) (err error) {
	r.status.do("look at the tables")
	unfit, err := r.compareTables(ctx, db)
	if err != nil {
		return err
	}
	defer func() { err = becauseOf(unfit, err) }()
	r.status.do("ask whether the WAL can be read")
	sys, why, err := r.mayStream(ctx, db)
	if err != nil {
		return err
	}
	if why != nil {
		return r.pollOnly(ctx, held, db, sys, why)
	}
	r.status.do("look at the slot")
	slots, err := stream.OpenSlots(ctx, r.cfg.server())
	if err != nil {
		return err
	}
	defer slots.Close()
	if err := r.skipInitial(ctx, db); err != nil {
		return err
	}
	cause, err := r.judgeSlot(ctx, db, slots)
	if err != nil {
		return err
	}
	if cause == nil {
		slots.Close()
		err := r.streamed(ctx, held, db)
		var open *unanswered
		if errors.As(err, &open) {
			return r.answerFirst(ctx, held, db, open.System)
		}
		return err
	}
	return r.rebuild(ctx, held, db, slots, cause)
}

// mayStream reports why the WAL cannot be read, nil where it can; sys identifies
// the server where it cannot.
func (r *Relay) mayStream(ctx context.Context, db *fallback.DB) (sys stream.System, why, err error) {
	if r.cfg.Mode == ModePoll {
		why = errModePoll
	} else if err = r.checkServer(ctx); errors.Is(err, stream.ErrCannotStream) && r.cfg.Mode == ModeAuto {
		why, err = err, nil
	} else if errors.Is(err, stream.ErrNoFreeSlot) || errors.Is(err, stream.ErrForeignSlot) {
		err = nil // the tables are polled while the slot cannot be made
	}
	if err != nil || why == nil {
		return sys, nil, err
	}
	if err := r.cfg.mayPoll(why); err != nil {
		return sys, nil, err
	}
	sys, err = identify(ctx, db)
	return sys, why, err
}

var errModePoll = errors.New("mode is poll")

// checkServer asks on connections of its own, as a session would.
func (s *servers) checkServer(ctx context.Context) error {
	db, err := fallback.Open(ctx, s.cfg.database())
	if err != nil {
		return err
	}
	defer db.Close()
	if err := stream.CheckServer(ctx, db.Conn(), s.cfg.Slot); err != nil {
		return err
	}
	_, err = stream.Probe(ctx, s.cfg.server(), s.cfg.Slot)
	return err
}

// pollOnly reads the tables for as long as the WAL cannot be read.
func (r *Relay) pollOnly(ctx, held context.Context, db *fallback.DB, sys stream.System, why error) error {
	r.log.Warn("polling: the tables are searched instead of the WAL being read", zap.NamedError("because", why))
	left := r.leaveSlot(ctx, db)
	return r.polled(ctx, held, db, sys, func(ctx context.Context, _ *session) error {
		for sleep(ctx, modeCheck) {
			if !left {
				left = r.leaveSlot(ctx, db)
			}
			if at := r.known.batchesAt; !at.IsZero() && !time.Now().Before(at) {
				return errBatchesAgain
			}
			if _, why, err := r.mayStream(ctx, db); err == nil && why == nil {
				r.log.Info("the WAL can be read now")
				return errModeChanged
			}
		}
		return nil
	})
}
