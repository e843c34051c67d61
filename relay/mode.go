package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
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

// errOverBudget means that the slot keeps more WAL than postgres.max_retained_wal.
var errOverBudget = errors.New("the slot keeps more WAL than it may")

func (r *Relay) setMode(mode string) {
	for _, m := range []string{modeStream, modePoll} {
		on := 0.0
		if m == mode {
			on = 1
		}
		r.metrics.mode.WithLabelValues(m).Set(on)
	}
}

// modeCheck is how often a relay that polls looks whether it could stream.
const modeCheck = 5 * time.Second

// session gets the rows in the best way that there is now, until something fails
// or another way opens up.
func (r *Relay) session(ctx, held context.Context, db *fallback.DB) error {
	sys, why, err := r.mayStream(ctx, db)
	if err != nil {
		return err
	}
	if why != nil {
		return r.pollOnly(ctx, held, db, sys, why)
	}
	slots, err := stream.OpenSlots(ctx, r.cfg.PostgresURL)
	if err != nil {
		return err
	}
	defer slots.Close()
	if err := r.skipInitial(ctx, db); err != nil {
		return err
	}
	cause, err := r.judgeSlot(ctx, slots)
	if err != nil {
		return err
	}
	if cause == nil {
		slots.Close()
		return r.streamed(ctx, held, db)
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
	} else if errors.Is(err, stream.ErrNoFreeSlot) {
		err = nil // the tables are polled while the slot cannot be made
	}
	if err != nil || why == nil {
		return sys, nil, err
	}
	if err := r.mayPoll(why); err != nil {
		return sys, nil, err
	}
	sys, err = identify(ctx, db)
	return sys, why, err
}

var errModePoll = errors.New("mode is poll")

// mayPoll reports an error where there is an outbox that nothing but the WAL can
// deliver. why is what keeps the WAL from being read.
func (r *Relay) mayPoll(why error) error {
	for _, t := range r.cfg.Outboxes {
		if t.Mark == outbox.MarkNone {
			return hint.Errorf("let the relay stream (mode: auto or stream, wal_level = logical, a role with REPLICATION), or set mark: update or delete, which can be polled",
				"outbox %s: mark none needs the WAL: %w", t, why)
		}
	}
	return nil
}

// checkServer asks on connections of its own, as a session would.
func (r *Relay) checkServer(ctx context.Context) error {
	db, err := fallback.Open(ctx, r.database())
	if err != nil {
		return err
	}
	defer db.Close()
	if err := stream.CheckServer(ctx, db.Conn(), r.cfg.Slot); err != nil {
		return err
	}
	_, err = stream.Probe(ctx, r.cfg.PostgresURL, r.cfg.Slot)
	return err
}

// pollOnly reads the tables for as long as the WAL cannot be read.
func (r *Relay) pollOnly(ctx, held context.Context, db *fallback.DB, sys stream.System, why error) error {
	r.log.Warn("polling: the tables are searched instead of the WAL being read", zap.NamedError("because", why))
	left := r.leaveSlots(ctx, db)
	return r.polled(ctx, held, db, sys, func(ctx context.Context, _ *session) error {
		for sleep(ctx, modeCheck) {
			if !left {
				left = r.leaveSlots(ctx, db)
			}
			if _, why, err := r.mayStream(ctx, db); err == nil && why == nil {
				r.log.Info("the WAL can be read now")
				return errModeChanged
			}
		}
		return nil
	})
}

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
func (r *Relay) newSlot() string { return r.cfg.Slot + "_new" }

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
	if err != nil || slot.Retained <= float64(r.cfg.MaxRetainedWAL) {
		return nil // a failing connection is noticed elsewhere
	}
	if !r.away.Load() && uint64(wal.Tracker().Confirmed()) < r.until.Load() {
		return nil
	}
	return fmt.Errorf("%w: %.0f bytes, postgres.max_retained_wal is %d", errOverBudget, slot.Retained, r.cfg.MaxRetainedWAL)
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
	if err := r.createSlot(ctx, slots); err != nil {
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
	if err := r.ensurePublication(ctx); err != nil {
		return err
	}
	if err := slots.Create(ctx, r.cfg.Slot); err != nil {
		return err
	}
	return errModeChanged
}

// createSlot waits for every transaction that is running, and says for which.
func (r *Relay) createSlot(ctx context.Context, slots *stream.Slots) error {
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
	err := slots.Create(ctx, r.newSlot())
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
		r.log.Warn("the creation of the slot waits for a transaction; the tables are polled meanwhile",
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

// initialLimit is how many pending rows a first start publishes without being told
// to.
const initialLimit = 100_000

// checkInitial asks, before anything is changed, what a first start shall do with
// a great many rows.
func (r *Relay) checkInitial(ctx context.Context, db *fallback.DB, streams, newStream bool) error {
	if r.cfg.Initial == "pending" {
		return nil
	}
	has, err := db.HasSlot(ctx) // first: the tables may be locked
	if err != nil {
		return err
	}
	for _, t := range r.cfg.Outboxes {
		switch {
		case r.cfg.Initial == "none" && (t.Mark != outbox.MarkUpdate || !t.Layout.Records()):
			return hint.Errorf("delete the rows that shall not be published yourself, and leave postgres.initial out",
				"postgres.initial: none marks rows instead of sending them, and says so in last_error: outbox %s needs mark: update and such a column for that", t)
		case r.cfg.Initial == "none" && !streams:
			return hint.Errorf("mark the rows that shall not be published yourself, and leave postgres.initial out",
				"postgres.initial none needs the WAL: only its slot tells a first start from a later one")
		case r.cfg.Initial == "none" || has:
			continue
		}
		n, err := db.PendingCount(ctx, t, initialLimit+1)
		if err != nil {
			return err
		}
		if n <= initialLimit {
			continue
		}
		first, err := r.isFirst(ctx, db, newStream)
		if err != nil || !first {
			return err
		}
		return hint.Errorf("set postgres.initial to pending to publish them all, or to none to mark them as processed without publishing them",
			"table %s has more than %d pending rows at this first start: postgres.initial must say what becomes of them", t, initialLimit)
	}
	return nil
}

// isFirst reports whether no relay was here before: there is no slot, no mark, and
// no message of this source.
func (r *Relay) isFirst(ctx context.Context, db *fallback.DB, newStream bool) (bool, error) {
	if has, err := db.HasSlot(ctx); err != nil || has {
		return false, err
	}
	for _, t := range r.cfg.Outboxes {
		if marked, err := db.HasMarks(ctx, t); err != nil || marked {
			return false, err
		}
	}
	if newStream {
		return true, nil
	}
	sent, err := r.hasSent(ctx)
	return !sent, err
}

// hasSent reports whether the stream holds a message of this source.
func (r *Relay) hasSent(ctx context.Context) (bool, error) {
	info, err := r.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	found, err := r.stream.ReadBack(ctx, info.FirstSeq, info.LastSeq, publish.ReadBackOptions{
		Source: r.envelope.Source(), Step: func([]publish.Message) (bool, error) { return false, nil },
	})
	return found.Own > 0, err
}

// skipInitial marks what was pending before a first start, where that is wanted. It
// is asked once, by the relay that holds the lock, before it makes the slot.
func (r *Relay) skipInitial(ctx context.Context, db *fallback.DB) error {
	if r.cfg.Initial != "none" || r.known.begun {
		return nil
	}
	first, err := r.isFirst(ctx, db, false)
	if err != nil || !first {
		r.known.begun = err == nil
		return err
	}
	skipped, err := fallback.SkipPending(ctx, r.database(), r.cfg.Outboxes)
	if err != nil {
		return err
	}
	for i, n := range skipped {
		if n > 0 {
			r.log.Warn("marked the rows that were pending before the first start, without publishing them (postgres.initial: none)",
				zapTable(r.cfg.Outboxes[i]), zap.Int64("rows", n))
		}
	}
	r.known.begun = true
	return nil
}
