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
	key   string // see outbox.AggregateKey; "" stands for all rows without one
}

// ordered reports whether the rows have an order among them.
func (a aggregate) ordered() bool { return a.key != "" }

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
type holds struct {
	mu    sync.Mutex
	moved *sync.Cond
	byKey map[aggregate]*hold
	size  atomic.Int64
	rows  int // in all queues
	bytes int
}

type hold struct {
	recording int // rows whose record is not committed yet
	joined    int // counts the rows that were recorded
	closing   bool
	draining  bool
	queue     []held
}

// The queues of all holds that are closing: past either, rows are recorded.
const (
	queueRows  = 2000
	queueBytes = 1 << 20
)

func newHolds() *holds {
	h := &holds{byKey: map[aggregate]*hold{}}
	h.moved = sync.NewCond(&h.mu)
	return h
}

// any is cheap: most of the time there is no hold.
func (h *holds) any() bool { return h.size.Load() > 0 }

// aggregates is how many there are whose rows have an order to be held for.
func (h *holds) aggregates() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for a := range h.byKey {
		if a.ordered() {
			n++
		}
	}
	return n
}

func (h *holds) has(a aggregate) bool {
	if !h.any() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.byKey[a] != nil
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
		x = &hold{}
		h.byKey[a] = x
		h.size.Store(int64(len(h.byKey)))
	}
	return x
}

// record notes that a row of the aggregate is about to be recorded, be it the one
// that failed. To be followed by recorded.
func (h *holds) record(a aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.openLocked(a); x != nil {
		x.recording++
		x.joined++
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

// join takes a row of the WAL. It reports whether the row is held, and then the
// rows that are to be recorded: none while they queue up.
func (h *holds) join(ev *outbox.Event, txn *stream.Txn) (isHeld bool, record []held) {
	a := aggregateOf(ev)
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byKey[a]
	if !a.ordered() {
		return false, nil
	}
	for x != nil && x.draining {
		h.moved.Wait()
		x = h.byKey[a]
	}
	if x == nil {
		return false, nil
	}
	if x.closing && h.rows < queueRows && h.bytes+ev.Size() <= queueBytes {
		x.queue = append(x.queue, held{ev.Clone(), txn})
		h.rows++
		h.bytes += ev.Size()
		return true, nil
	}
	record = append(h.takeQueue(x), held{ev, txn})
	x.joined += len(record)
	x.recording += len(record)
	return true, record
}

// takeQueue gives up closing.
func (h *holds) takeQueue(x *hold) []held {
	queue := x.queue
	x.closing, x.queue = false, nil
	for _, q := range queue {
		h.left(q)
	}
	return queue
}

// left notes that a row has left its queue.
func (h *holds) left(q held) {
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

// closing reports whether rows may be queued up.
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
func (h *holds) reopen(a aggregate, record func(held) error) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	defer h.moved.Broadcast()
	x := h.byKey[a]
	if x == nil || x.draining {
		return nil
	}
	queue := h.takeQueue(x)
	x.joined += len(queue)
	x.recording += len(queue)
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
func (h *holds) end(a aggregate, joined int, send func(held) error) error {
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
	delete(h.byKey, a)
	h.size.Store(int64(len(h.byKey)))
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

// load reads the records of every table.
func (h *holds) load(aggregates func(*outbox.Table) ([]string, error), tables []*outbox.Table) error {
	for _, t := range tables {
		if t.Mark == outbox.MarkNone {
			continue
		}
		keys, err := aggregates(t)
		if err != nil {
			return err
		}
		for _, key := range keys {
			h.open(aggregate{t, key})
		}
	}
	return nil
}
