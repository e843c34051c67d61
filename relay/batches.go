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

// refuseBatches notes that the server has refused a batch for what the publisher ended with.
func (s *session) refuseBatches(cause error) {
	pause := lastingRefusal
	if publish.ClassOf(cause) == publish.ClassTransient {
		pause = passingRefusal
	}
	s.past.batchesAt = time.Now().Add(pause)
	if !s.limited("batches_refused", lastingRefusal) {
		s.log.Warn("the server refuses batches: messages go one by one for a while",
			append(why(cause), zap.Duration("for", pause))...)
	}
}

// batching is how the next publisher hands messages over.
func (s *session) batching(info *jetstream.StreamInfo) jetstream.Batching {
	batching := s.cfg.Stream.Batching.Resolve(&info.Config, s.cfg.Stream.Shared)
	if batching == jetstream.BatchSingle || !time.Now().Before(s.past.batchesAt) {
		s.past.batchesAt = time.Time{}
		return batching
	}
	least := jetstream.DuplicateWindow(false)
	if info.Config.Duplicates < least && !s.limited("short_window", time.Hour) {
		s.log.Warn("messages go one by one into a stream whose duplicate window was made for batches",
			zap.Duration("duplicate_window", info.Config.Duplicates),
			zap.String("hint", fmt.Sprintf("nats stream edit %s --dupe-window %s", s.cfg.Stream.Name, least)))
	}
	return jetstream.BatchSingle
}
