package relay

import (
	"context"
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/stream"
)

// refuseSynchronous ends replication where commits wait for the relay: its
// confirmation waits for marks, which wait for the visibility of those commits.
func refuseSynchronous(ctx context.Context, p *reporter, db *table.DB, wal *stream.Session) error {
	sync, err := db.SyncState(ctx, wal.PID())
	if err != nil {
		return err
	}
	if sync == "" || sync == "async" {
		return nil
	}
	p.alarm(alarm.Synchronous, zap.String("sync_state", sync))
	return hint.Errorf("name the real standbys in synchronous_standby_names instead of '*'",
		"%w (sync_state %s)", errSynchronous, sync)
}

// serverWatch looks at the walsender and at the slot of a session, once a second. The goroutine that runs it
// owns what it has seen.
type serverWatch struct {
	*reporter
	cfg *Config
	db  *table.DB
	wal *stream.Session
	// keeps reports whether the slot is left alone, whatever it keeps.
	keeps func() bool

	life        string // the last sign of life of the walsender
	since       int    // how many looks ago
	interrupted bool   // the session delivered until then
}

// run fails when commits come to wait for the relay (a walsender counts as
// a standby from its first status on), and when the slot keeps more WAL than it may.
func (w *serverWatch) run(ctx context.Context) error {
	for sleep.For(ctx, time.Second) {
		if err := refuseSynchronous(ctx, w.reporter, w.db, w.wal); err != nil {
			return err
		}
		if err := w.checkWalsender(ctx); err != nil {
			return err
		}
		if err := w.checkBudget(ctx); err != nil {
			return err
		}
	}
	return nil
}

// silentLooks is for how many looks, one a second, a walsender may neither read WAL nor take
// a standby status, of which one is sent every second.
const silentLooks = 30

// checkWalsender raises an alarm where the walsender hangs: behind a lock on a catalog, in the
// system's I/O, or stopped. Neither the WAL nor the tables deliver then, since only the WAL
// can prove what it did not bring.
func (w *serverWatch) checkWalsender(ctx context.Context) error {
	pid := w.wal.PID()
	life, waits, err := w.db.SignOfLife(ctx, pid)
	if err != nil {
		return err
	}
	silent := w.since >= silentLooks
	if life == "" || life != w.life {
		w.life, w.since = life, 0
		if silent {
			w.ended(alarm.WalsenderSilent, zap.Uint32("pid", pid))
		}
		if w.interrupted {
			w.interrupted = false
			w.status.deliver(ctx, stateStreaming)
		}
		return nil
	}
	if w.since++; w.since == silentLooks {
		w.alarm(alarm.WalsenderSilent, zap.Uint32("pid", pid), zap.String("waits_for", waits))
		w.interrupted = w.status.interrupt("wait for the walsender")
	}
	return nil
}

// checkBudget fails when the slot keeps more WAL than it may, so that it is given
// up: the tables have all that it would bring. While rows flow and what may have
// been sent before is not passed yet, it is left alone.
func (w *serverWatch) checkBudget(ctx context.Context) error {
	if w.cfg.MaxRetainedWAL <= 0 {
		return nil
	}
	slot, err := w.db.Slot(ctx)
	if err != nil || slot.Retained <= w.cfg.MaxRetainedWAL {
		return nil // a failing connection is noticed elsewhere
	}
	if w.keeps() {
		return nil
	}
	return fmt.Errorf("%w: %d bytes, postgres.max_retained_wal is %d", errOverBudget, slot.Retained,
		w.cfg.MaxRetainedWAL)
}
