package relay

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/stream"
)

// refuseSynchronous ends replication where commits wait for the relay: its
// confirmation waits for marks, which wait for the visibility of those commits.
func (r *Relay) refuseSynchronous(ctx context.Context, db *fallback.DB, wal *stream.Session) error {
	sync, err := db.SyncState(ctx, wal.PID())
	if err != nil {
		return err
	}
	if sync == "" || sync == "async" {
		return nil
	}
	r.alarm("synchronous", "synchronous_standby_names includes the relay: replication ends", zap.String("sync_state", sync))
	return hint.Errorf("name the real standbys in synchronous_standby_names instead of '*'", "%w (sync_state %s)", errSynchronous, sync)
}

// watchServer fails when commits come to wait for the relay (a walsender counts as
// a standby from its first status on), and when the slot keeps more WAL than it may.
func (r *Relay) watchServer(ctx context.Context, db *fallback.DB, wal *stream.Session) error {
	var h hearing
	for sleep(ctx, time.Second) {
		if err := r.refuseSynchronous(ctx, db, wal); err != nil {
			return err
		}
		if err := r.hear(ctx, db, wal.PID(), &h); err != nil {
			return err
		}
		if err := r.checkBudget(ctx, db, wal); err != nil {
			return err
		}
	}
	return nil
}

// silentLooks is for how many looks, one a second, a walsender may neither read WAL nor take
// a standby status, of which one is sent every second.
const silentLooks = 30

// hearing is what was last heard of a walsender.
type hearing struct {
	life        string
	since       int  // how many looks ago
	interrupted bool // the session delivered until then
}

// hear raises an alarm where the walsender hangs: behind a lock on a catalog, in the
// system's I/O, or stopped. Neither the WAL nor the tables deliver then, since only the WAL
// can prove what it did not bring.
func (r *Relay) hear(ctx context.Context, db *fallback.DB, pid uint32, h *hearing) error {
	life, waits, err := db.SignOfLife(ctx, pid)
	if err != nil {
		return err
	}
	silent := h.since >= silentLooks
	if life == "" || life != h.life {
		h.life, h.since = life, 0
		if silent {
			r.log.Info("the walsender works again", zap.Uint32("pid", pid))
		}
		if h.interrupted {
			h.interrupted = false
			r.status.deliver(ctx, stateStreaming)
		}
		return nil
	}
	if h.since++; h.since == silentLooks {
		r.alarm("walsender_silent", "the walsender has read no WAL and taken no standby status for half a minute: nothing is delivered until it does",
			zap.Uint32("pid", pid), zap.String("waits_for", waits))
		h.interrupted = r.status.interrupt("wait for the walsender")
	}
	return nil
}
