package relay

import (
	"context"
	"math"
	"sync"

	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// movedRows is how many rows are remembered.
const movedRows = 4 * publish.U

// moved remembers the rows of partitioned tables that the session has sent, or is about to.
// An UPDATE that moves a row into another partition is a DELETE and an INSERT in the WAL:
// the WAL brings the row a second time, later than everything that was sent before.
type moved struct {
	mu sync.Mutex
	// taken has a number for each row, which grows with every row.
	taken map[outbox.Ref]uint64
	last  uint64
}

// fromTable is the number of a row that the loop is about to send.
const fromTable = math.MaxUint64

// take notes that the WAL has brought a row. It reports whether the row was taken before,
// and whether the loop is about to send it.
func (m *moved) take(ref outbox.Ref) (again, looping bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	n, again := m.taken[ref]
	if n == fromTable {
		return true, true
	}
	m.last++
	m.taken[ref] = m.last
	return again, false
}

// takeFromTable notes that the loop is about to send a row, until sent is called. It
// reports false where the WAL has brought the row since now returned a number.
func (m *moved) takeFromTable(ref outbox.Ref, now uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.taken[ref] > now {
		return false
	}
	m.taken[ref] = fromTable
	return true
}

func (m *moved) sent(ref outbox.Ref) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.taken[ref] = m.last
}

// now is the number of the newest row.
func (m *moved) now() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

func (m *moved) full() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.taken) >= movedRows
}

// keep forgets all rows but some.
func (m *moved) keep(some map[outbox.Ref]struct{}) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for ref := range m.taken {
		if _, ok := some[ref]; !ok && m.taken[ref] != fromTable {
			delete(m.taken, ref)
		}
	}
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
// about it. Where the session remembers too many rows, it forgets those that are settled,
// and the table decides about all that the WAL may bring of them.
func (f *feed) takeMoved(ctx context.Context, ev *outbox.Event) (inHand, ask bool, err error) {
	if f.moved.full() {
		some := map[outbox.Ref]struct{}{}
		f.loop.eachInHand(func(ref outbox.Ref) { some[ref] = struct{}{} })
		f.moved.keep(some)
		if f.movedUntil, err = f.db.InsertLSN(ctx); err != nil {
			return false, false, err
		}
	}
	ref := ev.Ref()
	again, inHand := f.moved.take(ref)
	if _, waits := f.seen.behind(ref, false); waits {
		return false, true, nil // its transaction waits for the mark, too
	}
	if again && !inHand {
		f.loop.eachInHand(func(other outbox.Ref) { inHand = inHand || other == ref })
	}
	return inHand, again || ev.Commit <= f.movedUntil, nil
}
