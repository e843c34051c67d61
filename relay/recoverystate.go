package relay

import (
	"sync"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// recoveryState is what a session knows of the sessions before it: what they may have sent, and what of
// that the table does not show as stored. The recovery scan makes it, see [Relay.recover].
type recoveryState struct {
	found jetstream.Found
	// recoveryLSN (E) is the greatest LSN under which anything can have been sent. Up to
	// there the table decides about every row that the WAL brings.
	recoveryLSN outbox.LSN
	// tail is the newest own message's position where it is of this WAL.
	tail outbox.Position
	// sent are the rows of the newest U messages, of tables without marks, where the tail
	// does not say it all: one of them may be missing among the others, or the tail is not
	// of this WAL. From sentFrom on they are complete.
	sent     map[outbox.Ref]struct{}
	sentFrom outbox.Position
	// healed counts rows that JetStream had lost and that are pending again. It is
	// set before the loop looks.
	healed int
	past   bool // the WAL is past the recovery LSN; the reader's own

	// mu guards what follows: the WAL handler and the loop ask for it. Both maps have the number of own
	// messages behind each row's.
	mu sync.Mutex
	// unmarked are rows that are in the stream and could not be marked yet.
	unmarked map[outbox.Ref]uint64
	// notShown are rows of the newest steps that the table does not show, perhaps not yet, until the WAL
	// has passed the recovery LSN. About every other row that was read back the table decides.
	notShown map[outbox.Ref]uint64
}

// mayHaveBeenSent reports whether an earlier session may have sent the row.
func (s *recoveryState) mayHaveBeenSent(ev *outbox.Event) bool { return ev.Commit <= s.recoveryLSN }

// messagesBehind reports whether the row's message was read in the stream although the
// table does not show the row as stored, and how many own messages follow it. A
// recorded row was not invisible then: if the table did not show it, it has come
// back since, to be delivered again.
func (s *recoveryState) messagesBehind(ref outbox.Ref, recorded bool) (n uint64, stored bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, stored = s.unmarked[ref]; !stored && !recorded {
		n, stored = s.notShown[ref]
	}
	return n, stored
}

// isSkipped reports whether a row without a mark is not in the stream although later ones
// are. Messages are under way one behind the other; where another writer's takes the place
// of one of them, that one is refused, and those behind it fit. The lane ends with that, so
// less than U messages can follow it, and the next session sends it first.
func (s *recoveryState) isSkipped(ev *outbox.Event) bool {
	if s.sent == nil || s.sentFrom.Covers(ev.Commit, ev.N) {
		return false
	}
	_, sent := s.sent[ev.Ref()]
	return !sent
}

// wasSent reports whether a row without a mark that the tail does not cover was read in the
// stream, which a server that was put back to an earlier state brings again.
func (s *recoveryState) wasSent(ev *outbox.Event) bool {
	if len(s.sent) == 0 {
		return false
	}
	_, sent := s.sent[ev.Ref()]
	return sent
}

// forget drops what the WAL will not bring any more: it is past the recovery LSN.
func (s *recoveryState) forget() {
	if s.past {
		return
	}
	s.past = true
	s.mu.Lock()
	defer s.mu.Unlock()
	s.notShown, s.unmarked, s.sent = nil, nil, nil
}
