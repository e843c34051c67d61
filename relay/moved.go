package relay

import (
	"context"
	"sync"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// movedRows is how many rows the reader and the poller remember each, and the rows that are in hand. A
// variable for tests.
var movedRows = 4 * jetstream.U

// moved remembers the rows of partitioned tables that the session has sent, or is about to.
// An UPDATE that moves a row into another partition is a DELETE and an INSERT in the WAL:
// the WAL brings the row a second time, later than everything that was sent before.
//
// The reader and the poller forget only what they have added themselves: of those rows each of them
// knows that they are in hand, settled, or recorded.
type moved struct {
	mu sync.Mutex // guards what follows
	// taken are rows that the WAL has brought, with a number that grows with every row.
	taken map[outbox.Ref]uint64
	last  uint64
	// polled are rows of the poller; true while it is about to send one.
	polled map[outbox.Ref]bool
	// until: up to there the WAL may bring rows that were settled and forgotten.
	until outbox.LSN
}

func newMoved() *moved { return &moved{taken: map[outbox.Ref]uint64{}, polled: map[outbox.Ref]bool{}} }

// take notes that the WAL has brought a row. It reports whether the row was taken before, whether
// the poller is about to send it, and up to which LSN other rows may have been.
func (m *moved) take(ref outbox.Ref) (again, looping bool, until outbox.LSN) {
	m.mu.Lock()
	defer m.mu.Unlock()
	looping, polled := m.polled[ref]
	if looping {
		return true, true, m.until
	}
	_, taken := m.taken[ref]
	m.last++
	m.taken[ref] = m.last
	return taken || polled, false, m.until
}

// takeFromTable notes that the poller is about to send a row, until sent is called. It
// reports false where the WAL has brought the row since now returned a number.
func (m *moved) takeFromTable(ref outbox.Ref, now uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.taken[ref] > now {
		return false
	}
	m.polled[ref] = true
	return true
}

func (m *moved) sent(ref outbox.Ref) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.polled[ref] = false
}

// now is the number of the newest row.
func (m *moved) now() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

func (m *moved) full() (taken, polled bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.taken) >= movedRows, len(m.polled) >= movedRows
}

// forgetSettled has the reader or the poller forget its rows that are settled. The table decides about
// what the WAL may bring of them: they were settled before the end of the WAL is read.
func forgetSettled[V any](
	ctx context.Context, m *moved, rows map[outbox.Ref]V, l *poller, db *table.DB,
) error {
	inHand := map[outbox.Ref]struct{}{}
	l.eachInHand(func(ref outbox.Ref) { inHand[ref] = struct{}{} })
	end, err := db.InsertLSN(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.until = max(m.until, end)
	for ref := range rows {
		if _, ok := inHand[ref]; !ok {
			delete(rows, ref)
		}
	}
	return nil
}

// anyPartitioned reports whether the WAL may bring rows twice.
func anyPartitioned(tables []*outbox.Table) (has bool) {
	for _, t := range tables {
		has = has || t.Partitioned && t.Mark != outbox.MarkNone
	}
	return has
}

// takeMoved takes a row of a partitioned table. It reports whether the row is in the relay's
// hands already, so that this is the row once more, and whether the table has to decide
// about it.
func (h *walHandler) takeMoved(ctx context.Context, ev *outbox.Event) (inHand, ask bool, err error) {
	if full, _ := h.moved.full(); full {
		if err := forgetSettled(ctx, h.moved, h.moved.taken, h.poller, h.db); err != nil {
			return false, false, err
		}
	}
	ref := ev.Ref()
	again, inHand, until := h.moved.take(ref)
	if _, waits := h.recovered.messagesBehind(ref, false); waits {
		return false, true, nil // its transaction waits for the mark, too
	}
	if again && !inHand {
		h.poller.eachInHand(func(other outbox.Ref) { inHand = inHand || other == ref })
	}
	return inHand, again || ev.Commit <= until, nil
}
