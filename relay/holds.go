package relay

import (
	"sync"
	"sync/atomic"

	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// aggregate is what order is kept for.
type aggregate struct {
	table *outbox.Table
	key   outbox.AggregateKey // the zero key stands for all rows without one
}

// ordered reports whether the rows have an order among them.
func (a aggregate) ordered() bool { return a.key != outbox.AggregateKey{} }

func aggregateOf(ev *outbox.Event) aggregate { return aggregate{ev.Table, ev.Aggregate()} }

// holds knows the aggregates with a failed row: the later rows of each wait in
// the table, recorded, until every record is gone (on_poison: hold), or are looked
// up before they are sent (skip). The records in the table say the same; a session
// begins by reading them.
//
// A hold ends in steps, so that an aggregate that is never quiet ends it too.
// While the loop sends what is recorded, the WAL's rows queue up here (closing).
// When no record is left, the queue is sent, and whoever brings another row waits
// for that (draining).
//
// Memory is bounded: past mostHeld aggregates, half of those that nothing is under
// way for are forgotten, and their table is partial. About an aggregate that is not
// known the records in a partial table decide (see join).
type holds struct {
	mu    sync.Mutex // guards what follows, and every hold
	moved *sync.Cond
	byKey map[aggregate]*hold
	rows  int // in all queues
	bytes int
	// joins numbers what hold.joined says.
	joins int
	// forgotten counts the aggregates that were forgotten. partial are the tables that
	// had some of them, with the number of aggregates that were last counted there.
	forgotten uint64
	partial   map[*outbox.Table]int

	size atomic.Int64 // see any
}

type hold struct {
	recording int // rows whose record is not committed yet
	joined    int // another number after each row that was recorded
	closing   bool
	draining  bool
	queue     []pendingRow
}

// idle reports whether the table knows as much of the aggregate as this does.
func (x *hold) idle() bool { return x.recording == 0 && !x.draining && len(x.queue) == 0 }

// The queues of all holds that are closing: past either, rows are recorded.
const (
	queueRows  = 2000
	queueBytes = 1 << 20
)

func newHolds() *holds {
	h := &holds{byKey: map[aggregate]*hold{}, partial: map[*outbox.Table]int{}}
	h.moved = sync.NewCond(&h.mu)
	return h
}

// any is cheap: most of the time there is no hold.
func (h *holds) any() bool { return h.size.Load() > 0 }

func (h *holds) resized() { h.size.Store(int64(len(h.byKey) + len(h.partial))) }

// mayHave reports whether there is a hold, or only the table can tell.
func (h *holds) mayHave(a aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.byKey[a] != nil || h.isPartial(a.table)
}

// open notes that the aggregate has a record in the table.
func (h *holds) open(a aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.openLocked(a)
}

func (h *holds) openLocked(a aggregate) *hold {
	x := h.byKey[a]
	if x == nil && a.table.Layout.Records() {
		h.forget()
		h.joins++
		x = &hold{joined: h.joins}
		h.byKey[a] = x
		h.resized()
	}
	return x
}

// record notes that a row of the aggregate is about to be recorded, be it the one
// that failed. To be followed by recorded.
func (h *holds) record(a aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.openLocked(a); x != nil {
		h.recordAll(x, 1)
	}
}

// recorded notes that the row's record is committed, or that it needs none.
func (h *holds) recorded(a aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.byKey[a]; x != nil {
		x.recording--
	}
}

// verdict is what is known of a row's aggregate.
type verdict uint8

const (
	isFree    verdict = iota
	isHeld            // the row is not to be sent
	isUnknown         // only the table can tell
)

// check tells of an aggregate. asked is when the table was asked about it last.
func (h *holds) check(a aggregate, asked asOf) verdict {
	if !h.any() || !a.ordered() {
		return isFree
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.checkLocked(a, asked)
}

func (h *holds) checkLocked(a aggregate, asked asOf) verdict {
	switch {
	case h.byKey[a] != nil:
		return isHeld
	case h.isPartial(a.table) && asked != h.nowLocked():
		return isUnknown
	}
	return isFree
}

// join takes a row of the WAL. Of one that is held it returns the rows that are to be
// recorded: none while they queue up.
func (h *holds) join(ev *outbox.Event, txn *stream.Txn, asked asOf) (v verdict, record []pendingRow) {
	a := aggregateOf(ev)
	if !a.ordered() {
		return isFree, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byKey[a]
	for x != nil && x.draining {
		h.moved.Wait()
		x = h.byKey[a]
	}
	if v := h.checkLocked(a, asked); v != isHeld {
		return v, nil
	}
	if x.closing && h.rows < queueRows && h.bytes+ev.Size() <= queueBytes {
		x.queue = append(x.queue, pendingRow{ev.Clone(), txn})
		h.rows++
		h.bytes += ev.Size()
		return isHeld, nil
	}
	record = append(h.takeQueue(x), pendingRow{ev, txn})
	h.recordAll(x, len(record))
	return isHeld, record
}

// recordAll notes that so many rows of a hold are about to be recorded.
func (h *holds) recordAll(x *hold, rows int) {
	h.joins++
	x.joined = h.joins
	x.recording += rows
}

// takeQueue gives up closing.
func (h *holds) takeQueue(x *hold) []pendingRow {
	queue := x.queue
	x.closing, x.queue = false, nil
	for _, q := range queue {
		h.left(q)
	}
	return queue
}

// left notes that a row has left its queue.
func (h *holds) left(q pendingRow) {
	h.rows--
	h.bytes -= q.ev.Size()
}

// close lets the aggregate's rows queue up while the records are worked off.
func (h *holds) close(a aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.byKey[a]; x != nil && a.ordered() {
		x.closing = true
	}
}

// isClosing reports whether the aggregate's rows may be queued up.
func (h *holds) isClosing(a aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byKey[a]
	return x != nil && x.closing
}

// closing reports whether any rows may be queued up.
func (h *holds) closing() bool {
	if !h.any() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.byKey {
		if x.closing {
			return true
		}
	}
	return false
}

// reopen gives up closing, because a record is there to stay. It has the queue
// recorded, before any row that the WAL brings then.
func (h *holds) reopen(a aggregate, record func(pendingRow) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.moved.Broadcast()
	x := h.byKey[a]
	if x == nil || x.draining {
		return nil
	}
	queue := h.takeQueue(x)
	h.recordAll(x, len(queue))
	x.draining = true
	defer func() { x.draining = false }()
	h.mu.Unlock()
	defer h.mu.Lock()
	for _, q := range queue {
		if err := record(q); err != nil {
			return err
		}
	}
	return nil
}

// quiet lists the aggregates of a table that no row is being recorded of, each
// with a number for end.
func (h *holds) quiet(t *outbox.Table) map[aggregate]int {
	if !h.any() {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	list := map[aggregate]int{}
	for a, x := range h.byKey {
		if a.table == t && x.recording == 0 {
			list[a] = x.joined
		}
	}
	return list
}

// end ends the hold of an aggregate that has no record left, unless one has come
// since quiet returned the number: it sends what has queued up. Where that fails,
// the row is the caller's, and the rest stays queued.
func (h *holds) end(a aggregate, joined int, send func(pendingRow) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.moved.Broadcast()
	x := h.byKey[a]
	if x == nil || x.joined != joined {
		return nil
	}
	x.draining = true
	for len(x.queue) > 0 {
		next := x.queue[0]
		h.mu.Unlock() // the settler must get on: the lane may have to wait for it
		err := send(next)
		h.mu.Lock()
		x.queue = x.queue[1:]
		h.left(next)
		if err != nil {
			x.draining = false
			return err
		}
	}
	if x.joined != joined { // the WAL has brought a retried dead letter meanwhile
		x.draining = false
		return nil
	}
	delete(h.byKey, a)
	h.resized()
	return nil
}

// queued calls each with every row that waits here.
func (h *holds) queued(each func(outbox.Ref)) {
	if !h.any() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.byKey {
		for _, q := range x.queue {
			each(q.ev.Ref())
		}
	}
}
