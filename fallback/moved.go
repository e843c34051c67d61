package fallback

import (
	"context"
	"sync"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// MostMoved is how many rows the WAL handler and the poller remember each, and the rows that are in hand.
const MostMoved = 4 * passRows

// Moved remembers the rows of partitioned tables that the session has sent, or is about to.
// An UPDATE that moves a row into another partition is a DELETE and an INSERT in the WAL:
// the WAL brings the row a second time, later than everything that was sent before.
//
// The WAL handler and the poller forget only what they have added themselves: of those rows each of them
// knows that they are in hand, settled, or recorded.
type Moved struct {
	most int

	mu sync.Mutex // guards what follows
	// taken are rows that the WAL has brought, with a number that grows with every row.
	taken map[outbox.Ref]uint64
	last  uint64
	// polled are rows of the poller; true while it is about to send one.
	polled map[outbox.Ref]bool
	// until: up to there the WAL may bring rows that were settled and forgotten.
	until outbox.LSN
	// ids are those of append-only tables that the session has taken.
	ids map[*outbox.Table]*idSet
}

// NewMoved makes one. Past most rows from the WAL, or from the poller, settled ones are forgotten.
func NewMoved(most int) *Moved {
	return &Moved{
		most: most, taken: map[outbox.Ref]uint64{}, polled: map[outbox.Ref]bool{},
		ids: map[*outbox.Table]*idSet{},
	}
}

// TakeID notes the id of an append-only table's row that the WAL has brought, or the poller sends. It reports
// whether that was taken before.
func (m *Moved) TakeID(t *outbox.Table, id int64) (again bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ids[t] == nil {
		m.ids[t] = &idSet{}
	}
	return m.ids[t].add(id)
}

// Take notes that the WAL has brought a row. It reports whether the row was taken before, whether
// the poller is about to send it, and up to which LSN other rows may have been.
func (m *Moved) Take(ref outbox.Ref) (again, polling bool, until outbox.LSN) {
	m.mu.Lock()
	defer m.mu.Unlock()
	polling, polled := m.polled[ref]
	if polling {
		return true, true, m.until
	}
	_, taken := m.taken[ref]
	m.last++
	m.taken[ref] = m.last
	return taken || polled, false, m.until
}

// takeFromTable notes that the poller is about to send a row, until sent is called. It
// reports false where the WAL has brought the row since now returned a number.
func (m *Moved) takeFromTable(ref outbox.Ref, now uint64) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.taken[ref] > now {
		return false
	}
	m.polled[ref] = true
	return true
}

func (m *Moved) sent(ref outbox.Ref) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.polled[ref] = false
}

// now is the number of the newest row.
func (m *Moved) now() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.last
}

// Len is how many rows are remembered. It is for tests.
func (m *Moved) Len() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.taken) + len(m.polled)
}

func (m *Moved) full() (taken, polled bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.taken) >= m.most, len(m.polled) >= m.most
}

// ForgetTaken has the WAL handler forget its settled rows when it remembers many. db must not be the
// poller's.
func (m *Moved) ForgetTaken(ctx context.Context, inHand InHand, db *table.DB) error {
	if full, _ := m.full(); !full {
		return nil
	}
	return forgetSettled(ctx, m, m.taken, inHand, db)
}

// forgetPolled has the poller forget its settled rows when it remembers many.
func (m *Moved) forgetPolled(ctx context.Context, inHand InHand, db *table.DB) error {
	if _, full := m.full(); !full {
		return nil
	}
	return forgetSettled(ctx, m, m.polled, inHand, db)
}

// forgetSettled: the table decides about what the WAL may bring of these rows later. They were settled
// before the end of the WAL is read.
func forgetSettled[V any](
	ctx context.Context, m *Moved, rows map[outbox.Ref]V, inHand InHand, db *table.DB,
) error {
	keep := map[outbox.Ref]struct{}{}
	inHand.each(func(ref outbox.Ref, _ bool) { keep[ref] = struct{}{} })
	end, err := db.InsertLSN(ctx)
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.until = max(m.until, end)
	for ref := range rows {
		if _, ok := keep[ref]; !ok {
			delete(rows, ref)
		}
	}
	return nil
}
