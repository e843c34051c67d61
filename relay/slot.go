package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// errOverBudget means that the slot keeps more WAL than postgres.max_retained_wal.
var errOverBudget = errors.New("the slot keeps more WAL than it may")

// leaveSlots drops the slot of a relay that does not stream any more, and one that
// was not finished: they would keep WAL for ever. It reports whether they are gone.
func (r *Relay) leaveSlots(ctx context.Context, db *fallback.DB) bool {
	for _, name := range []string{r.cfg.Slot, r.newSlot()} {
		err := db.DropSlot(ctx, name)
		if err == nil {
			continue
		}
		if !r.limited("slot_left", 10*time.Minute) {
			r.alarm("slot_left", "the relay polls and cannot drop its slot, which makes the server keep WAL",
				zap.String("slot", name), zap.Error(err), zap.String("hint", fmt.Sprintf("SELECT pg_drop_replication_slot('%s')", name)))
		}
		return false
	}
	return true
}

// newSlot is the name of a slot that is being made.
func (r *Relay) newSlot() string { return stream.NewSlotName(r.cfg.Slot) }

// judgeSlot reports why the slot is to be made anew, nil where it is of use.
func (r *Relay) judgeSlot(ctx context.Context, slots *stream.Slots) (cause, err error) {
	_, err = slots.Read(ctx, r.cfg.Slot)
	switch {
	case errors.Is(err, stream.ErrNoSlot), errors.Is(err, stream.ErrSlotLost):
		return err, nil
	case err != nil:
		return nil, err
	case r.known.unusable != nil:
		return r.known.unusable, nil
	}
	if _, err := slots.Read(ctx, r.newSlot()); !errors.Is(err, stream.ErrNoSlot) {
		return fmt.Errorf("an earlier relay did not finish making slot %q", r.newSlot()), nil
	}
	return nil, nil
}

// unusable reports whether a session has ended because of its slot.
func unusable(err error) bool {
	return errors.Is(err, errOverBudget) || errors.Is(err, stream.ErrPublicationSkipped) || errors.Is(err, stream.ErrUndecodable) ||
		errors.Is(err, stream.ErrSlotLost) || errors.Is(err, stream.ErrBeforePublication)
}

// checkBudget fails when the slot keeps more WAL than it may, so that it is given
// up: the tables have all that it would bring. While rows flow and what may have
// been sent before is not passed yet, it is left alone.
func (r *Relay) checkBudget(ctx context.Context, db *fallback.DB, wal *stream.Session) error {
	if r.cfg.MaxRetainedWAL <= 0 || marksOf(r.cfg.Outboxes)[outbox.MarkNone] {
		return nil
	}
	slot, err := db.Slot(ctx)
	if err != nil || slot.Retained <= r.cfg.MaxRetainedWAL {
		return nil // a failing connection is noticed elsewhere
	}
	if !r.away.Load() && uint64(wal.Tracker().Confirmed()) < r.until.Load() {
		return nil
	}
	return fmt.Errorf("%w: %d bytes, postgres.max_retained_wal is %d", errOverBudget, slot.Retained, r.cfg.MaxRetainedWAL)
}

// rebuild makes the slot anew, without a gap: the new one is there before the
// tables are searched, and has its name only when every row that it may lack is
// answered. It ends in errModeChanged when that is done.
func (r *Relay) rebuild(ctx, held context.Context, db *fallback.DB, slots *stream.Slots, cause error) error {
	first := errors.Is(cause, stream.ErrNoSlot)
	if !first {
		r.alarm("slot_given_up", "the slot is of no use any more: it is made anew, and the tables deliver meanwhile", zap.Error(cause))
	}
	if err := r.dropSlots(ctx, slots); err != nil {
		return err
	}
	r.known.unusable = nil
	r.status.own()
	sys, err := slots.System(ctx)
	if err != nil {
		return err
	}
	if marksOf(r.cfg.Outboxes)[outbox.MarkNone] {
		return r.createBare(ctx, slots, first)
	}
	began := time.Now()
	sent := r.stored.Load()
	return r.polled(ctx, held, db, sys, func(ctx context.Context, s *session) error {
		for err := r.makeSlot(ctx, slots, s); err != nil; err = r.remakeSlot(ctx, s) {
			if ctx.Err() != nil {
				// It would keep WAL until a relay starts.
				_ = db.DropSlot(context.WithoutCancel(ctx), r.newSlot())
				return nil
			}
			if !r.limited("slot_not_made", time.Minute) {
				r.alarm("slot_not_made", "the slot cannot be made: the tables are polled until it can", append(why(err), zap.String("slot", r.cfg.Slot))...)
			}
			sleep(ctx, modeCheck)
		}
		r.metrics.slots.Inc()
		r.log.Info("the slot is there, and everything from before it is answered", zap.String("slot", r.cfg.Slot), zap.Bool("first", first),
			zap.Duration("took", time.Since(began).Round(time.Millisecond)), zap.Int64("stored_from_the_tables", r.stored.Load()-sent))
		return errModeChanged
	})
}

// makeSlot makes the slot under a name for the meantime, waits until the tables
// have nothing from before it, and gives it its name.
func (r *Relay) makeSlot(ctx context.Context, slots *stream.Slots, s *session) error {
	if err := r.createSlot(ctx, slots, r.newSlot()); err != nil {
		return err
	}
	crash("created")
	if err := s.loop.answer(ctx); err != nil {
		return err
	}
	crash("answered")
	if err := slots.Rename(ctx, r.newSlot(), r.cfg.Slot); err != nil {
		return err
	}
	crash("renamed")
	return nil
}

// remakeSlot begins again where makeSlot has failed.
func (r *Relay) remakeSlot(ctx context.Context, s *session) error {
	slots, err := stream.OpenSlots(ctx, r.cfg.PostgresURL)
	if err != nil {
		return err
	}
	defer slots.Close()
	if err := r.dropSlots(ctx, slots); err != nil {
		return err
	}
	return r.makeSlot(ctx, slots, s)
}

func (r *Relay) dropSlots(ctx context.Context, slots *stream.Slots) error {
	for _, name := range []string{r.newSlot(), r.cfg.Slot} {
		if err := slots.Drop(ctx, name); err != nil {
			return err
		}
		crash("dropped")
	}
	return nil
}

// createBare makes a slot where no table has what it lacks (mark none).
func (r *Relay) createBare(ctx context.Context, slots *stream.Slots, first bool) error {
	if !first {
		r.alarm("wal_lost", "with mark none only the WAL had the events: those that the slot had not brought yet are lost")
	}
	r.status.do("create the slot")
	if err := r.createSlot(ctx, slots, r.cfg.Slot); err != nil {
		return err
	}
	return errModeChanged
}

// createSlot waits for every transaction that is running, and says for which.
func (r *Relay) createSlot(ctx context.Context, slots *stream.Slots, name string) error {
	// The publication comes first: decoding looks it up as of each change.
	if err := r.ensurePublication(ctx); err != nil {
		return err
	}
	done := make(chan struct{})
	said := make(chan struct{})
	go func() {
		defer close(said)
		r.sayWait(ctx, slots.PID(), done)
	}()
	err := slots.Create(ctx, name)
	close(done)
	<-said
	return err
}

// sayWait names the transaction that a slot's creation waits for.
func (r *Relay) sayWait(ctx context.Context, pid uint32, done <-chan struct{}) {
	began := time.Now()
	defer r.metrics.slotWait.Set(0)
	for {
		select {
		case <-done:
			return
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
		r.metrics.slotWait.Set(time.Since(began).Seconds())
		if r.limited("slot_waits", 30*time.Second) {
			continue
		}
		who := r.blockerOf(ctx, pid)
		r.log.Warn("the creation of the slot waits for a transaction",
			zap.Duration("waiting", time.Since(began).Round(time.Second)), zap.String("for", who))
	}
}

func (r *Relay) blockerOf(ctx context.Context, pid uint32) string {
	db, err := fallback.Open(ctx, r.database())
	if err != nil {
		return err.Error()
	}
	defer db.Close()
	who, err := db.BlockerOf(ctx, pid)
	if err != nil {
		return err.Error()
	}
	return who
}

// ensurePublication creates the publication where that is possible.
func (r *Relay) ensurePublication(ctx context.Context) error {
	db, err := fallback.Open(ctx, r.database())
	if err != nil {
		return err
	}
	defer db.Close()
	return r.createPublication(ctx, db)
}
