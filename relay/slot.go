package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/stream"
)

// errOverBudget means that the slot keeps more WAL than postgres.max_retained_wal.
var errOverBudget = errors.New("the slot keeps more WAL than it may")

// errNotStreamed: a slot that nothing shows to be the relay's may be another program's.
var errNotStreamed = errors.New("the stream holds nothing that a relay has read from a slot")

// leaveSlot drops the slot of a relay that does not stream any more: it would keep WAL
// for ever. It reports whether that is done, or is not to be done.
func (r *Relay) leaveSlot(ctx context.Context, db *fallback.DB) bool {
	if has, err := db.HasSlot(ctx); err == nil && !has {
		return true
	}
	streamed, err := r.hasStreamed(ctx)
	switch {
	case err != nil:
		return false // an outage: asked again
	case streamed:
		err = db.DropSlot(ctx, r.cfg.Slot)
	default:
		err = errNotStreamed
	}
	if err != nil && !r.limited("slot_left", 10*time.Minute) {
		r.alarm("slot_left", "the relay polls, and the slot of its name is not dropped: it makes the server keep WAL",
			zap.String("slot", r.cfg.Slot), zap.Error(err), zap.String("hint", fmt.Sprintf("where no other program needs it, SELECT pg_drop_replication_slot('%s')", r.cfg.Slot)))
	}
	return err == nil || !streamed
}

// hasStreamed reports whether one of the newest messages of this source came from the WAL.
func (s *servers) hasStreamed(ctx context.Context) (streamed bool, err error) {
	info, err := s.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	_, err = s.stream.ReadBack(ctx, info.FirstSeq, info.LastSeq, jetstream.ReadBackOptions{
		Source: s.envelope.Source(), Step: func(messages []jetstream.Message) (bool, error) {
			for _, m := range messages {
				streamed = streamed || !m.Polled && !m.ID.Replay
			}
			return false, nil
		},
	})
	return streamed, err
}

// judgeSlot reports why the slot has to be recreated, nil where it is of use.
func (r *Relay) judgeSlot(ctx context.Context, db *fallback.DB, slots *stream.Slots) (cause, err error) {
	slot, err := slots.Read(ctx, r.cfg.Slot)
	switch {
	case errors.Is(err, stream.ErrNoSlot), errors.Is(err, stream.ErrSlotLost), errors.Is(err, stream.ErrForeignSlot):
		return err, nil
	case err != nil:
		return nil, err
	case r.known.unusable != nil:
		return r.known.unusable, nil
	}
	return nil, r.sayAdopted(ctx, db, slot)
}

// sayAdopted tells once in a process's life that the slot may be another program's: nothing
// shows that a relay was here before.
func (r *Relay) sayAdopted(ctx context.Context, db *fallback.DB, slot *stream.Slot) error {
	if r.known.judged {
		return nil
	}
	left, err := r.hasLeftTraces(ctx, db, false)
	switch {
	case fallback.Passing(err):
		return nil // a locked table: the next session asks again
	case err != nil:
		return err
	}
	r.known.judged = true
	if !left {
		r.log.Info("using a slot that is there already, although no relay has delivered anything yet: if another program has made it, give one of the two another name",
			zap.String("slot", slot.Name), zap.Stringer("confirmed_lsn", slot.ConfirmedFlush))
	}
	return nil
}

// unusable reports whether a session has ended because of its slot.
func unusable(err error) bool {
	return errors.Is(err, errOverBudget) || errors.Is(err, stream.ErrPublicationSkipped) || errors.Is(err, stream.ErrUndecodable) ||
		errors.Is(err, errUnsendable) || errors.Is(err, stream.ErrSlotLost) || errors.Is(err, stream.ErrBeforePublication)
}

// checkBudget fails when the slot keeps more WAL than it may, so that it is given
// up: the tables have all that it would bring. While rows flow and what may have
// been sent before is not passed yet, it is left alone.
func (r *Relay) checkBudget(ctx context.Context, db *fallback.DB, wal *stream.Session) error {
	if r.cfg.MaxRetainedWAL <= 0 || r.cfg.bare() {
		return nil
	}
	slot, err := db.Slot(ctx)
	if err != nil || slot.Retained <= r.cfg.MaxRetainedWAL {
		return nil // a failing connection is noticed elsewhere
	}
	if !r.away.Load() && uint64(wal.Tracker().Confirmed()) < r.recoveryLSN.Load() {
		return nil
	}
	return fmt.Errorf("%w: %d bytes, postgres.max_retained_wal is %d", errOverBudget, slot.Retained, r.cfg.MaxRetainedWAL)
}

// rebuild recreates the slot without a gap: the new one is there before the
// tables are searched, and has its name only when every row that it may lack is
// answered. It ends in errModeChanged when that is done.
func (r *Relay) rebuild(ctx, held context.Context, db *fallback.DB, slots *stream.Slots, cause error) error {
	first := errors.Is(cause, stream.ErrNoSlot)
	switch {
	case errors.Is(cause, stream.ErrForeignSlot):
		if err := r.alarmForeign(cause); err != nil {
			return err
		}
	case !first && !r.cfg.bare():
		r.alarm("slot_given_up", "the slot is of no use any more: it is recreated, and the tables deliver meanwhile", zap.Error(cause))
	}
	if err := r.dropSlot(ctx, db); err != nil {
		return err
	}
	r.known.unusable, r.known.unsendable, r.known.judged = nil, unsendable{}, true
	r.status.own()
	sys, err := slots.System(ctx)
	if err != nil {
		return err
	}
	if r.cfg.bare() {
		return r.createBare(ctx, slots, cause)
	}
	slots.Close()
	began := time.Now()
	sent := r.stored.Load()
	return r.polled(ctx, held, db, sys, func(ctx context.Context, s *session) error {
		for err := r.makeSlot(ctx, db, s); err != nil; err = r.makeSlot(ctx, db, s) {
			if ctx.Err() != nil {
				return nil
			}
			if !r.limited("slot_not_made", time.Minute) {
				r.alarm("slot_not_made", "the slot cannot be made: the tables are polled until it can", append(why(err), zap.String("slot", r.cfg.Slot))...)
			}
			r.status.meanwhile("wait before the slot is made again", time.Now())
			r.status.failing(err)
			sleep(ctx, modeCheck)
		}
		r.known.answered = sys.Timeline
		r.metrics.slots.Inc()
		r.log.Info("the slot is there, and everything from before it is answered", zap.String("slot", r.cfg.Slot), zap.Bool("first", first),
			zap.Duration("took", time.Since(began).Round(time.Millisecond)), zap.Int64("stored_from_the_tables", r.stored.Load()-sent))
		return errModeChanged
	})
}

// alarmForeign: with mark none there is nothing to deliver meanwhile.
func (r *Relay) alarmForeign(cause error) error {
	if !r.limited("slot_foreign", time.Minute) {
		r.alarm("slot_foreign", "another program has a slot of the relay's name: it is left alone, and the relay has none", why(cause)...)
	}
	if r.cfg.bare() {
		return cause
	}
	return nil
}

// makeSlot makes a temporary slot, waits until the tables have nothing from before it, and
// copies it. A relay that ends on the way leaves nothing. While a table lacks a column of its
// layout there is no slot: the next row would have it given up.
func (r *Relay) makeSlot(ctx context.Context, db *fallback.DB, s *session) error {
	if err := r.checkColumns(ctx, db); err != nil {
		return err
	}
	slots, err := stream.OpenSlots(ctx, r.cfg.server())
	if err != nil {
		return err
	}
	defer slots.Close()
	if err := r.dropSlot(ctx, db); err != nil { // of an attempt that failed
		return err
	}
	if _, err := slots.Read(ctx, r.cfg.Slot); errors.Is(err, stream.ErrForeignSlot) {
		return err
	}
	r.status.meanwhile("create the slot", time.Now())
	name := stream.NewSlotName(r.cfg.Slot)
	if err := r.createSlot(ctx, slots, func() error { return slots.CreateTemporary(ctx, name) }); err != nil {
		return err
	}
	crash("created")
	if err := s.loop.answer(ctx); err != nil {
		return err
	}
	crash("answered")
	if err := slots.Copy(ctx, name, r.cfg.Slot); err != nil {
		return err
	}
	crash("renamed")
	return nil
}

// dropSlot drops the relay's own slot; another program's is left alone.
func (r *Relay) dropSlot(ctx context.Context, db *fallback.DB) error {
	if err := db.DropSlot(ctx, r.cfg.Slot); pg.Code(err) == pgerrcode.ObjectInUse {
		return fmt.Errorf("%w: %w", stream.ErrSlotActive, err)
	} else if err != nil {
		return err
	}
	crash("dropped")
	return nil
}

// createBare makes a slot where no table has what it lacks (mark none). There was none, or one that
// the server has invalidated, from which nothing can be read any more.
func (r *Relay) createBare(ctx context.Context, slots *stream.Slots, cause error) error {
	r.status.do("create the slot")
	if err := r.createSlot(ctx, slots, func() error { return slots.Create(ctx, r.cfg.Slot) }); err != nil {
		return err
	}
	// Only now: until there is a slot, every event is lost.
	if sent, err := r.hasSent(ctx); sent || err != nil || !errors.Is(cause, stream.ErrNoSlot) {
		r.alarm("wal_lost", "with mark none only the WAL had the events: those that the slot had not brought yet are lost", zap.Error(cause))
	}
	return errModeChanged
}

// createSlot waits for every transaction that is running, and says for which.
func (r *Relay) createSlot(ctx context.Context, slots *stream.Slots, create func() error) error {
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
	err := create()
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
	db, err := fallback.Open(ctx, r.cfg.database())
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
	db, err := fallback.Open(ctx, r.cfg.database())
	if err != nil {
		return err
	}
	defer db.Close()
	return createPublication(ctx, r.reporter, db, r.cfg)
}
