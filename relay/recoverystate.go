package relay

import (
	"context"
	"maps"
	"sync"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// recoveryState is what a session knows of the sessions before it: what they may have sent, and what of
// that the table does not show as stored. The recovery scan makes it, see recovery.
type recoveryState struct {
	found jetstream.Found
	// recoveryLSN: no row with a greater commit LSN can have been sent before. Up to it the
	// table decides about every row that the WAL brings.
	recoveryLSN outbox.LSN
	// tail is the newest own message's position where it is of this WAL.
	tail outbox.Position
	// healed counts rows that JetStream had lost and that are pending again: session.heal has them delivered.
	healed int
	// past: the WAL is past the recovery LSN. The reader writes it, under mu, or who waits in its place.
	past bool
	like *Likenesses
	// isOwn reads the message at a sequence, and reports whether it is a row's own.
	isOwn func(ctx context.Context, ev *outbox.Event, seq uint64) (bool, error)

	// mu guards what follows: the WAL handler and the poller ask for it.
	mu sync.Mutex
	// unmarked are rows that are in the stream and could not be marked yet, and the number of own messages
	// behind each.
	unmarked map[outbox.Ref]uint64
	// notShown are rows that were read back and that the table does not show, perhaps not yet, until the WAL
	// has passed the recovery LSN, or, where none is read, what is open has ended and is answered. Those of a
	// partitioned table stay until the session ends: a partition may come back. About every other row that
	// was read back the table decides.
	notShown map[outbox.Ref]readBack
}

// readBack is where a message is in the stream, and how many own ones are behind it.
type readBack struct{ seq, behind uint64 }

// mayHaveBeenSent reports whether an earlier session may have sent the row.
func (s *recoveryState) mayHaveBeenSent(ev *outbox.Event) bool { return ev.Commit <= s.recoveryLSN }

// StoredBefore reports whether the row's message was read in the stream although the table does not show the
// row as stored, and how many of the relay's messages follow it. A row that was not shown could not be
// compared with its message, so that happens here. notShown does not count for a recorded row: only a visible
// row can be recorded, so one that the scan did not see was put back later and must be sent.
func (s *recoveryState) StoredBefore(
	ctx context.Context, ev *outbox.Event, recorded bool,
) (n uint64, stored bool, err error) {
	ref := ev.Ref()
	s.mu.Lock()
	n, stored = s.unmarked[ref]
	at, unseen := s.notShown[ref]
	s.mu.Unlock()
	if stored || !unseen || recorded {
		return n, stored, nil
	}
	if stored, err = s.isOwn(ctx, ev, at.seq); err == nil && !stored {
		s.mu.Lock()
		delete(s.notShown, ref)
		s.mu.Unlock()
	}
	return at.behind, stored, err
}

// awaitsRows reports whether the WAL may still bring rows that were read back and that the table did not
// show.
func (s *recoveryState) awaitsRows() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return !s.past && len(s.notShown) > 0
}

// wasRead reports whether a message with the row's id was read although the table does not show the row as
// stored.
func (s *recoveryState) wasRead(ref outbox.Ref) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, unmarked := s.unmarked[ref]
	_, unseen := s.notShown[ref]
	return unmarked || unseen
}

// forget drops what neither the WAL nor the table will bring any more.
func (s *recoveryState) forget() {
	if s.past {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.past = true
	maps.DeleteFunc(s.notShown, func(ref outbox.Ref, _ readBack) bool { return !ref.Table.Partitioned })
	s.unmarked = nil
}
