package relay

import (
	"sync"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// seen is what a session knows from reading the stream back.
type seen struct {
	found jetstream.Found
	// until is E: the greatest LSN under which anything can have been sent. Up to
	// there the table decides about every row that the WAL brings.
	until outbox.LSN
	// tail is the newest own message's position where it is of this WAL.
	tail outbox.Position
	// stored are rows of the newest steps that the table does not show, perhaps
	// not yet, with the number of own messages behind each, until the WAL has
	// passed E. About every other row that was read back the table decides.
	stored map[outbox.Ref]uint64
	// sent are the rows of the newest U messages, of tables without marks, where the tail
	// does not say it all: one of them may be missing among the others, or the tail is not
	// of this WAL. From sentFrom on they are complete.
	sent     map[outbox.Ref]struct{}
	sentFrom outbox.Position
	// unmarked are rows that are in the stream and could not be marked yet, with
	// the number of own messages behind each.
	unmarked map[outbox.Ref]uint64
	// mu guards stored and unmarked: the loop looks, too.
	mu sync.Mutex
	// healed counts rows that JetStream had lost and that are pending again. It is
	// set before the loop looks.
	healed int
	past   bool // the WAL is past E; the reader's own
}

// bygone reports whether the row may have been sent before.
func (s *seen) bygone(ev *outbox.Event) bool { return ev.Commit <= s.until }

// behind reports whether the row's message was read in the stream although the
// table does not show the row as stored, and how many own messages follow it. A
// recorded row was not invisible then: if the table did not show it, it has come
// back since, to be delivered again.
func (s *seen) behind(ref outbox.Ref, recorded bool) (n uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok = s.unmarked[ref]; !ok && !recorded {
		n, ok = s.stored[ref]
	}
	return n, ok
}

// displaced reports whether a row without a mark is not in the stream although later ones
// are. Messages are under way one behind the other; where another writer's takes the place
// of one of them, that one is refused, and those behind it fit. The lane ends with that, so
// less than U messages can follow it, and the next session sends it first.
func (s *seen) displaced(ev *outbox.Event) bool {
	if s.sent == nil || s.sentFrom.Covers(ev.Commit, ev.N) {
		return false
	}
	_, sent := s.sent[ev.Ref()]
	return !sent
}

// wasSent reports whether a row without a mark that the tail does not cover was read in the
// stream, which a server that was put back to an earlier state brings again.
func (s *seen) wasSent(ev *outbox.Event) bool {
	if len(s.sent) == 0 {
		return false
	}
	_, sent := s.sent[ev.Ref()]
	return sent
}

// forget drops what the WAL will not bring any more: it is past E.
func (s *seen) forget() {
	if s.past {
		return
	}
	s.past = true
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stored, s.unmarked, s.sent = nil, nil, nil
}
