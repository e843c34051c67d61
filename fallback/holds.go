package fallback

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/walpost/walpost/outbox"
)

// Aggregate is what order is kept for.
type Aggregate struct {
	Table *outbox.Table
	Key   outbox.AggregateKey // the zero key stands for all rows without one
}

// Ordered reports whether the rows have an order among them.
func (a Aggregate) Ordered() bool { return a.Key != outbox.AggregateKey{} }

// AggregateOf is the row's.
func AggregateOf(ev *outbox.Event) Aggregate { return Aggregate{ev.Table, ev.Aggregate()} }

// PendingRow is a row that the WAL has brought and that is not in the publisher yet.
type PendingRow struct {
	Event *outbox.Event
	By    Waiter // its transaction
}

// Holds knows the aggregates with a record: a row that has failed, or one that waits behind it.
// With on_poison: hold the later rows of each wait in the table, recorded, until every record is
// gone. With skip they are looked up before they are sent. The records in the tables say the same,
// and a session begins by reading them.
//
// An aggregate has no hold, or one in three states, named by what happens to its rows from the WAL:
// they are recorded, they queue up, or they wait while the queue is emptied.
//
//	event           caused by        none           recording      queueing          emptying
//	open            poller, handler, recording      -              -                 -
//	                start
//	BeginRecord     poller, handler  recording, +1  +1             +1                +1
//	EndRecord       marker           -              -1             -1                -1
//	Join            handler          row is sent    row is         row queues up; no waits for
//	                                                recorded       room: recording,  endEmptying
//	                                                               all are recorded
//	queueRows       poller           -              queueing       -                 x
//	quiet           poller           -              quiet where none is under way    x
//	end             poller           -              emptying where still quiet       x
//	keep            poller           -              -              emptying          x
//	next, left      poller           x              x              x                 a row leaves the queue
//	endEmptying     poller           x              x              x                 none where still quiet,
//	                                                                                 else recording; broken
//	                                                                                 off: queueing
//	forget          any, at the cap  -              none where none is under way     -
//	                                                and none is queued
//
// "-" changes nothing. "x" is impossible: one goroutine, the poller's, causes these events in turn. +1
// and -1 count the rows whose record is under way; +1 also ends quiet. So a hold ends only if the table
// shows no record after the last one was committed, and none was begun since it was asked. While a
// queue is emptied, it is sent as long as it is quiet, and recorded from then on.
//
// Without the queue an aggregate that is never quiet would never come out.
type Holds struct {
	most int
	// mu guards the fields below, and every hold. A method takes it once and keeps it until it returns, or
	// is named Locked and called with it.
	// No method waits, asks a table or hands a row over under it: those that do (AwaitEmptied, Ask, Load,
	// empty) call others for each step.
	mu    sync.Mutex
	byKey map[Aggregate]*hold
	rows  int // in all queues
	bytes int
	// emptied is closed when the queue that the WAL handler waits for is empty; else nil.
	emptied chan struct{}
	// forgotten counts the aggregates that were forgotten. partial are the tables that
	// had some of them, with the number of aggregates that were last counted there.
	forgotten uint64
	partial   map[*outbox.Table]int

	size atomic.Int64 // see Any
}

type hold struct {
	state    holdState
	quiet    bool // no row was recorded since the poller began to ask the table
	underWay int  // rows whose record is not committed yet
	queue    []PendingRow
}

type holdState uint8

const (
	recording holdState = iota
	queueing
	emptying
)

// idle reports whether the table knows as much of the aggregate as this does.
func (x *hold) idle() bool { return x.underWay == 0 && x.state != emptying && len(x.queue) == 0 }

// record counts rows that are about to be recorded.
func (x *hold) record(rows int) {
	x.quiet = false
	x.underWay += rows
}

// mostQueued rows, and mostQueuedBytes, are in all queues: past either, rows are recorded. The first is
// a variable for tests.
var mostQueued = 2000

const mostQueuedBytes = 1 << 20

// NewHolds makes one without a hold. At most aggregates, idle ones are forgotten until half are left.
func NewHolds(most int) *Holds {
	return &Holds{most: most, byKey: map[Aggregate]*hold{}, partial: map[*outbox.Table]int{}}
}

// Any reports whether there is a hold. It is cheap: most of the time there is no hold.
func (h *Holds) Any() bool { return h.size.Load() > 0 }

func (h *Holds) resizedLocked() { h.size.Store(int64(len(h.byKey) + len(h.partial))) }

// MayHave reports whether there is a hold, or only the table can tell.
func (h *Holds) MayHave(a Aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.byKey[a] != nil || h.isPartialLocked(a.Table)
}

// open notes that the aggregate has a record in the table.
func (h *Holds) open(a Aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.openLocked(a)
}

// openLocked returns nil where the table's rows cannot be recorded.
func (h *Holds) openLocked(a Aggregate) *hold {
	x := h.byKey[a]
	if x == nil && a.Table.Layout.Records() {
		h.forgetLocked()
		x = &hold{}
		h.byKey[a] = x
		h.resizedLocked()
	}
	return x
}

// BeginRecord notes that a row is about to be recorded, be it the one that failed. An EndRecord
// follows, or the end of the session.
func (h *Holds) BeginRecord(a Aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.openLocked(a); x != nil {
		x.record(1)
	}
}

// EndRecord notes that the row's record is committed, or that it needs none.
func (h *Holds) EndRecord(a Aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.byKey[a]; x != nil {
		x.underWay--
	}
}

// Verdict is what is known of a row's aggregate.
type Verdict uint8

const (
	IsFree     Verdict = iota
	IsHeld             // the row is not to be sent
	IsUnknown          // only the table can tell
	IsEmptying         // the row waits until the queue is empty
)

// check tells of an aggregate. asked is when the table was asked about it last.
func (h *Holds) check(a Aggregate, asked AsOf) Verdict {
	if !h.Any() || !a.Ordered() {
		return IsFree
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.checkLocked(a, asked)
}

func (h *Holds) checkLocked(a Aggregate, asked AsOf) Verdict {
	switch {
	case h.byKey[a] != nil:
		return IsHeld
	case h.isPartialLocked(a.Table) && asked != h.nowLocked():
		return IsUnknown
	}
	return IsFree
}

// Join takes a row of the WAL. Where the verdict is IsHeld it returns the rows that are to be
// recorded now: none where the row has queued up.
func (h *Holds) Join(row PendingRow, asked AsOf) (v Verdict, record []PendingRow) {
	a := AggregateOf(row.Event)
	if !a.Ordered() {
		return IsFree, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if v := h.checkLocked(a, asked); v != IsHeld {
		return v, nil
	}
	x := h.byKey[a]
	switch {
	case x.state == emptying:
		if h.emptied == nil {
			h.emptied = make(chan struct{})
		}
		return IsEmptying, nil
	case x.state == queueing && h.rows < mostQueued && h.bytes+row.Event.Size() <= mostQueuedBytes:
		x.queue = append(x.queue, PendingRow{row.Event.Clone(), row.By})
		h.rows++
		h.bytes += row.Event.Size()
		return IsHeld, nil
	}
	record = append(x.queue, row)
	for range x.queue {
		h.dequeueLocked(x)
	}
	x.state = recording
	x.record(len(record))
	return IsHeld, record
}

// dequeueLocked removes the first row of a queue.
func (h *Holds) dequeueLocked(x *hold) {
	h.rows--
	h.bytes -= x.queue[0].Event.Size()
	if x.queue = x.queue[1:]; len(x.queue) == 0 {
		x.queue = nil
	}
}

// AwaitEmptied returns when the aggregate that Join has called emptying may be joined.
func (h *Holds) AwaitEmptied(ctx context.Context) error {
	emptied := h.emptiedEnd()
	if emptied == nil {
		return nil
	}
	select {
	case <-emptied:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (h *Holds) emptiedEnd() <-chan struct{} {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.emptied
}

// queueRows has the aggregate's rows queue up while the poller sends those that are recorded.
func (h *Holds) queueRows(a Aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if x := h.byKey[a]; x != nil && x.state == recording && a.Ordered() {
		x.state = queueing
	}
}

// queues reports whether the aggregate's hold is queueing or emptying.
func (h *Holds) queues(a Aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byKey[a]
	return x != nil && x.state != recording
}

// anyQueues reports whether the rows of any aggregate do.
func (h *Holds) anyQueues() bool {
	if !h.Any() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.byKey {
		if x.state != recording {
			return true
		}
	}
	return false
}

// quiet lists the aggregates of a table that no row is being recorded of. The table is to be asked
// after it: end ends the holds of those without a record.
func (h *Holds) quiet(t *outbox.Table) map[Aggregate]struct{} {
	if !h.Any() {
		return nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	list := map[Aggregate]struct{}{}
	for a, x := range h.byKey {
		if a.Table == t && x.underWay == 0 {
			x.quiet = true
			list[a] = struct{}{}
		}
	}
	return list
}

// end begins to empty the queue of an aggregate without a record, unless one was begun since quiet
// listed it.
func (h *Holds) end(a Aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byKey[a]
	if x == nil || !x.quiet {
		return false
	}
	x.state = emptying
	return true
}

// keep begins to empty the queue of an aggregate whose record stays.
func (h *Holds) keep(a Aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byKey[a]
	if x == nil || x.state != queueing {
		return false
	}
	x.state, x.quiet = emptying, false
	return true
}

// empty follows end and keep. It has each row of the queue sent, or recorded where a record was begun
// meanwhile. The WAL handler waits for it with the aggregate's next row.
func (h *Holds) empty(a Aggregate, work func(row PendingRow, send bool) error) error {
	defer h.endEmptying(a)
	for {
		row, send, more := h.next(a)
		if !more {
			return nil
		}
		if err := work(row, send); err != nil {
			return err
		}
		h.left(a)
	}
}

// next is the first row of the queue. It stays there until its next place has it: see queued.
func (h *Holds) next(a Aggregate) (row PendingRow, send, more bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	x := h.byKey[a]
	if len(x.queue) == 0 {
		return PendingRow{}, false, false
	}
	if !x.quiet {
		x.record(1)
	}
	return x.queue[0], x.quiet, true
}

func (h *Holds) left(a Aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.dequeueLocked(h.byKey[a])
}

func (h *Holds) endEmptying(a Aggregate) {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch x := h.byKey[a]; {
	case len(x.queue) > 0:
		x.state = queueing
	case !x.quiet:
		x.state = recording
	default:
		delete(h.byKey, a)
		h.resizedLocked()
	}
	if h.emptied != nil {
		close(h.emptied)
		h.emptied = nil
	}
}

// queued calls each with every row that waits here.
func (h *Holds) queued(each func(outbox.Ref)) {
	if !h.Any() {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, x := range h.byKey {
		for _, q := range x.queue {
			each(q.Event.Ref())
		}
	}
}
