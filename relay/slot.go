package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/stream"
)

// errOverBudget means that the slot keeps more WAL than postgres.max_retained_wal.
var errOverBudget = errors.New("the slot keeps more WAL than it may")

// errNotStreamed: a slot that nothing shows to be the relay's may be another program's.
var errNotStreamed = errors.New("the stream holds nothing that a relay has read from a slot")

// slotKeeper makes the relay's slot, and drops it. It has no state: slots are the server's.
type slotKeeper struct {
	*reporter
	*servers
}

// leave drops the slot of a relay that does not stream any more: it would keep WAL
// for ever. It reports whether that is done, or is not to be done.
func (k *slotKeeper) leave(ctx context.Context, db *table.DB) bool {
	if has, err := db.HasSlot(ctx); err == nil && !has {
		k.over("slot_left", alarm.SlotLeft, zap.String("slot", k.cfg.Slot))
		return true
	}
	streamed, err := k.hasStreamed(ctx)
	switch {
	case err != nil:
		return false // an outage: asked again
	case streamed:
		err = db.DropSlot(ctx, k.cfg.Slot)
	default:
		err = errNotStreamed
	}
	if err != nil && !k.limited("slot_left", 10*time.Minute) {
		k.alarm(alarm.SlotLeft, zap.String("slot", k.cfg.Slot), zap.Error(err),
			zap.String("hint", fmt.Sprintf(
				"where no other program needs it, SELECT pg_drop_replication_slot('%s')", k.cfg.Slot)))
	}
	if err == nil {
		k.over("slot_left", alarm.SlotLeft, zap.String("slot", k.cfg.Slot))
	}
	return err == nil || !streamed
}

// hasStreamed reports whether one of the newest messages of this source came from the WAL.
func (s *servers) hasStreamed(ctx context.Context) (streamed bool, err error) {
	info, err := s.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	_, err = s.stream.ScanBackward(ctx, info.FirstSeq, info.LastSeq, jetstream.ScanOptions{
		Source: s.envelope.Source(), Step: func(messages []jetstream.Message) (bool, error) {
			for _, m := range messages {
				streamed = streamed || !m.Polled && !m.ID.Replay
			}
			return false, nil
		},
	})
	return streamed, err
}

// alarmForeign says that another program has the slot's name.
func (k *slotKeeper) alarmForeign(cause error) {
	if !k.limited("slot_foreign", time.Minute) {
		k.alarm(alarm.SlotForeign, why(cause)...)
	}
}

// makeAnswered makes a temporary slot, has answer wait until the tables have nothing from before it, and
// copies it. A relay that ends on the way leaves nothing.
func (k *slotKeeper) makeAnswered(
	ctx context.Context, db *table.DB, answer func(context.Context) error,
) error {
	slots, err := stream.OpenSlots(ctx, k.server())
	if err != nil {
		return err
	}
	defer slots.Close()
	if err := k.drop(ctx, db); err != nil { // of an attempt that failed
		return err
	}
	if _, err := slots.Read(ctx, k.cfg.Slot); errors.Is(err, stream.ErrForeignSlot) {
		return err
	}
	k.status.meanwhile("create the slot", time.Now())
	name := stream.NewSlotName(k.cfg.Slot)
	if err := k.create(ctx, slots, func() error { return slots.CreateTemporary(ctx, name) }); err != nil {
		return err
	}
	crash.At("created")
	if err := answer(ctx); err != nil {
		return err
	}
	crash.At("answered")
	if err := slots.Copy(ctx, name, k.cfg.Slot); err != nil {
		return err
	}
	crash.At("renamed")
	return nil
}

// drop drops the relay's own slot; another program's is left alone.
func (k *slotKeeper) drop(ctx context.Context, db *table.DB) error {
	if err := db.DropSlot(ctx, k.cfg.Slot); pg.Code(err) == pgerrcode.ObjectInUse {
		return fmt.Errorf("%w: %w", stream.ErrSlotActive, err)
	} else if err != nil {
		return err
	}
	crash.At("dropped")
	return nil
}

// create waits for every transaction that is running, and says for which.
func (k *slotKeeper) create(ctx context.Context, slots *stream.Slots, do func() error) error {
	// The publication comes first: decoding looks it up as of each change.
	if err := k.ensurePublication(ctx); err != nil {
		return err
	}
	done := make(chan struct{})
	said := make(chan struct{})
	go func() {
		defer close(said)
		k.sayWait(ctx, slots.PID(), done)
	}()
	err := do()
	close(done)
	<-said
	return err
}

// sayWait names the transaction that a slot's creation waits for.
func (k *slotKeeper) sayWait(ctx context.Context, pid uint32, done <-chan struct{}) {
	began := time.Now()
	defer k.metrics.slotWait.Set(0)
	for {
		select {
		case <-done:
			return
		case <-ctx.Done():
			return
		case <-time.After(time.Second):
		}
		k.metrics.slotWait.Set(time.Since(began).Seconds())
		if k.limited("slot_waits", 30*time.Second) {
			continue
		}
		who := k.blockerOf(ctx, pid)
		k.log.Warn("the creation of the slot waits for a transaction",
			zap.Duration("waiting", time.Since(began).Round(time.Second)), zap.String("for", who))
	}
}

func (k *slotKeeper) blockerOf(ctx context.Context, pid uint32) string {
	db, err := table.Open(ctx, k.database())
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
func (k *slotKeeper) ensurePublication(ctx context.Context) error {
	db, err := table.Open(ctx, k.database())
	if err != nil {
		return err
	}
	defer db.Close()
	if len(k.outboxes) == 0 { // all are set aside, and a new slot would end at once
		return stream.CheckPublication(ctx, db.Conn(), k.cfg.Publication, nil)
	}
	return createPublication(ctx, k.reporter, db, k.cfg.Publication, k.outboxes)
}
