package stream

import (
	"sync"

	"github.com/walpost/walpost/outbox"
)

// Tracker turns "this row is settled" into "the WAL up to here may be forgotten". It is a FIFO of entries:
// one for each transaction, with the number of rows that are not settled yet, and one for each keepalive
// that came outside a transaction. An entry leaves the queue when it is the oldest, closed, and has nothing
// pending. The end of the last one that left is the confirmed LSN, which never goes back. The zero Tracker is
// not usable; see [NewTracker].
type Tracker struct {
	// mu guards everything below, and every Txn of the tracker.
	mu      sync.Mutex
	queue   []*Txn // queue[head:] are waiting, oldest first
	head    int
	free    []*Txn
	settled outbox.LSN
	sweepAt int // how many have to wait before they are swept
}

// sweepLeast is how many entries wait before any is swept out of the middle.
const sweepLeast = 1024

// Txn is a transaction on its way, or a keepalive.
type Txn struct {
	tracker *Tracker
	pending int
	end     outbox.LSN
	closed  bool // its commit was received
}

// NewTracker starts at what the server holds for confirmed already.
func NewTracker(confirmed outbox.LSN) *Tracker {
	return &Tracker{settled: confirmed}
}

// Confirmed is the greatest LSN under which everything received is settled.
func (t *Tracker) Confirmed() outbox.LSN {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.settled
}

// Begin opens a transaction. Nothing that is received after it can be confirmed
// before it.
func (t *Tracker) Begin() *Txn {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.push()
}

// Pin has nothing confirmed that is received from now on, until release is called.
func (t *Tracker) Pin() (release func()) {
	x := t.Begin()
	return func() { x.Commit(0) }
}

// Idle notes a keepalive received outside a transaction: everything committed
// below end has been received.
func (t *Tracker) Idle(end outbox.LSN) {
	t.mu.Lock()
	defer t.mu.Unlock()
	x := t.push()
	x.closed, x.end = true, end
	t.fold()
	t.pop()
}

func (t *Tracker) push() *Txn {
	var x *Txn
	if n := len(t.free); n > 0 {
		x, t.free = t.free[n-1], t.free[:n-1]
		*x = Txn{tracker: t}
	} else {
		x = &Txn{tracker: t}
	}
	if t.head > 0 && len(t.queue) == cap(t.queue) {
		n := copy(t.queue, t.queue[t.head:])
		t.queue, t.head = t.queue[:n], 0
	}
	t.queue = append(t.queue, x)
	if waiting := len(t.queue) - t.head; waiting >= max(t.sweepAt, sweepLeast) {
		t.sweep()
		t.sweepAt = 2 * (len(t.queue) - t.head)
	}
	return x
}

// sweep lets every entry that waits for no row become part of the one
// before: a row that stays unsettled would let entries pile up behind it without
// bound. The caller holds mu.
func (t *Tracker) sweep() {
	kept := t.queue[t.head : t.head+1]
	for _, x := range t.queue[t.head+1:] {
		before := kept[len(kept)-1]
		if !x.closed || x.pending > 0 || !before.closed {
			kept = append(kept, x)
			continue
		}
		before.end = max(before.end, x.end)
		t.free = append(t.free, x)
	}
	end := t.head + len(kept)
	clear(t.queue[end:])
	t.queue = t.queue[:end]
}

// pop removes every entry at the front that is done. The caller holds mu.
func (t *Tracker) pop() {
	for t.head < len(t.queue) {
		x := t.queue[t.head]
		if !x.closed || x.pending > 0 {
			return
		}
		t.settled = max(t.settled, x.end)
		t.queue[t.head] = nil
		t.head++
		t.free = append(t.free, x)
	}
	t.queue, t.head = t.queue[:0], 0
}

// Add says that one more row of the transaction waits to be settled.
func (x *Txn) Add() {
	x.tracker.mu.Lock()
	defer x.tracker.mu.Unlock()
	x.pending++
}

// Settled says that one row that was added is settled. Once the transaction is closed and its
// last row is settled, the Txn is used for another one.
func (x *Txn) Settled() {
	t := x.tracker
	t.mu.Lock()
	defer t.mu.Unlock()
	x.pending--
	t.pop()
}

// Commit closes the transaction with the end LSN of its commit record.
func (x *Txn) Commit(end outbox.LSN) {
	t := x.tracker
	t.mu.Lock()
	defer t.mu.Unlock()
	x.closed, x.end = true, end
	t.fold()
	t.pop()
}

// fold does for the newest entry what sweep does for all: most transactions have no
// row of an outbox. The caller holds mu.
func (t *Tracker) fold() {
	n := len(t.queue)
	if n-t.head < 2 {
		return
	}
	last, before := t.queue[n-1], t.queue[n-2]
	if !last.closed || last.pending > 0 || !before.closed {
		return
	}
	before.end = max(before.end, last.end)
	t.queue = t.queue[:n-1]
	t.free = append(t.free, last)
}
