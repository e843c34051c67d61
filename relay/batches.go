package relay

import (
	"fmt"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/publish"
)

const (
	// passingRefusal is how long messages go one by one after a refusal of a batch that
	// passes, such as too many batches of others that are open, and lastingRefusal after one
	// that a setting of the server makes.
	passingRefusal = 10 * time.Second
	lastingRefusal = time.Hour
)

// errBatchesAgain ends a session that sends messages one by one, because the next one may
// send batches again.
var errBatchesAgain = fmt.Errorf("%w: batches are tried again", errModeChanged)

// refuseBatches notes that the server has refused a batch for what the lane ended with.
func (r *Relay) refuseBatches(cause error) {
	pause := lastingRefusal
	if publish.ClassOf(cause) == publish.ClassTransient {
		pause = passingRefusal
	}
	r.known.batchesAt = time.Now().Add(pause)
	if !r.limited("batches_refused", lastingRefusal) {
		r.log.Warn("the server refuses batches: messages go one by one for a while", append(why(cause), zap.Duration("for", pause))...)
	}
}

// batching is how the next lane hands messages over.
func (r *Relay) batching(info *jetstream.StreamInfo) jetstream.Batching {
	batching := r.cfg.Stream.Batching.Resolve(&info.Config, r.cfg.Stream.Shared)
	if batching == jetstream.BatchSingle || !time.Now().Before(r.known.batchesAt) {
		r.known.batchesAt = time.Time{}
		return batching
	}
	least := jetstream.DuplicateWindow(false)
	if info.Config.Duplicates < least && !r.limited("short_window", time.Hour) {
		r.log.Warn("messages go one by one into a stream whose duplicate window was made for batches", zap.Duration("duplicate_window", info.Config.Duplicates),
			zap.String("hint", fmt.Sprintf("nats stream edit %s --dupe-window %s", r.cfg.Stream.Name, least)))
	}
	return jetstream.BatchSingle
}
