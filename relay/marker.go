package relay

import (
	"context"
	"sync"
	"time"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

const (
	markBatch = 1000
	// takeBatch bounds what is taken from the publisher at once: the rest may as well wait
	// there, in memory that it has anyway.
	takeBatch = markBatch
	// linger lets marks gather: each statement is a commit, and only the confirmed LSN waits for it.
	linger = 10 * time.Millisecond
	// backlog bounds what the reader has handed over and the marker not taken.
	backlog = 256
	// finishTimeout bounds the last tries of an ending session.
	finishTimeout = 2 * time.Second
	// lockedAlarm is how long a row may stay locked before its holder is named.
	lockedAlarm = fallback.LockedAlarm
)

// taskKind is what is to be done with a row.
type taskKind uint8

const (
	toMark taskKind = iota // it is stored
	toPark                 // it has failed
	toHold                 // it waits behind a row that has
	toNote                 // it was inserted as processed
)

// records reports whether the task takes a row out of the WAL's hands: such rows stand in line.
func (t taskKind) records() bool { return t == toPark || t == toHold }

// markTask is one row on its way to be settled.
type markTask struct {
	row    table.Row
	kind   taskKind
	of     fallback.Aggregate // of a row that is recorded
	sent   bool
	index  uint64          // in the publisher
	by     fallback.Waiter // may be nil
	trace  *rowTrace       // nil where it is not traced
	others []fallback.Waiter
	behind uint64 // own messages behind it, of a row that the recovery scan has read
	begun  time.Time
	due    time.Time
	wait   time.Duration
	named  bool // the lock's holder was
	alone  bool // it has broken a statement
	gone   bool // a statement did not find it
	failed bool // a statement with it has failed, and part of that may be done
	// unlocked: the row could not be changed although no session had locked it.
	unlocked bool
	// refused: the database refuses its mark or record; locked: an alarm has named the lock of its row.
	refused, locked bool
}

// marker marks what was stored and records what failed, in batches, and tells
// the trackers. What cannot be settled yet is tried again, for ever.
type marker struct {
	reporter  *reporter
	retry     table.Retry
	db        *table.DB
	publisher *publish.Publisher
	holds     *fallback.Holds
	noter     *noter
	// parked is called when a failure is recorded.
	parked func()
	in     chan *markTask
	stop   chan struct{}
	done   chan struct{}

	// waiting has the rows that the recovery scan has read and that are not marked yet;
	// recording those whose record is under way. mu guards both: the reader and the
	// poller add rows, the marker removes them.
	mu        sync.Mutex
	waiting   map[outbox.Ref]*markTask
	recording map[outbox.Ref]int

	// tasks and lines are the marker's own: what it has taken and not settled yet.
	// Rows to be recorded stand in line, aggregate by aggregate. If a later row were
	// recorded first, a crash between the two would let the wrong one be sent first.
	tasks   []*markTask
	lines   map[fallback.Aggregate][]*markTask
	inLines int
	refused int // how many of them are

	// Memory that is used again: the marker's own.
	taken []publish.Delivery
	out   []uint64
	rows  []table.Row
	free  []*markTask
}

func newMarker(
	p *reporter, retry table.Retry, db *table.DB, publisher *publish.Publisher,
	h *fallback.Holds, s *recoveryState,
) *marker {
	w := &marker{
		reporter: p, retry: retry, db: db, publisher: publisher, holds: h, parked: func() {},
		in: make(chan *markTask, backlog), stop: make(chan struct{}), done: make(chan struct{}),
		waiting: map[outbox.Ref]*markTask{}, recording: map[outbox.Ref]int{},
		lines: map[fallback.Aggregate][]*markTask{},
	}
	now := time.Now()
	for ref, behind := range s.unmarked {
		j := &markTask{row: table.Row{Ref: ref}, behind: behind + 1, begun: now, due: now}
		w.waiting[ref] = j
		w.tasks = append(w.tasks, j)
	}
	w.reserve()
	return w
}

// Stored has a row marked that was read back from the stream and that the WAL or
// the table brings again, and lets the waiter wait for it.
func (w *marker) Stored(ctx context.Context, row table.Row, behind uint64, by fallback.Waiter) error {
	w.mu.Lock()
	if j := w.waiting[row.Ref]; j != nil {
		j.others = append(j.others, by)
		w.mu.Unlock()
		return nil
	}
	j := &markTask{row: row, by: by, behind: behind + 1}
	w.waiting[row.Ref] = j
	w.mu.Unlock()
	return w.add(ctx, j)
}

// Park has a failure recorded.
func (w *marker) Park(ctx context.Context, row table.Row, of fallback.Aggregate, by fallback.Waiter) error {
	w.holds.BeginRecord(of)
	return w.enlist(ctx, &markTask{row: row, kind: toPark, of: of, by: by})
}

// Hold has it recorded that a row waits. Its aggregate's hold counts it already.
func (w *marker) Hold(ctx context.Context, row table.Row, of fallback.Aggregate, by fallback.Waiter) error {
	return w.enlist(ctx, &markTask{row: row, kind: toHold, of: of, by: by})
}

func (w *marker) enlist(ctx context.Context, j *markTask) error {
	w.mu.Lock()
	w.recording[j.row.Ref]++
	w.mu.Unlock()
	return w.add(ctx, j)
}

// Busy calls each with every row that is to be marked or recorded and is not in
// the publisher.
func (w *marker) Busy(each func(outbox.Ref)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ref := range w.waiting {
		each(ref)
	}
	for ref := range w.recording {
		each(ref)
	}
}

// add waits while too many tasks are under way.
func (w *marker) add(ctx context.Context, j *markTask) error {
	j.begun = time.Now()
	j.due = j.begun
	select {
	case w.in <- j:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run settles until finish is called, ctx is done, or the database fails.
func (w *marker) run(ctx context.Context) error {
	defer close(w.done)
	for {
		if !w.gather(ctx) {
			return nil
		}
		err := w.pass(ctx)
		if err == nil {
			err = w.note(ctx)
		}
		if err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

// note has it noted what was stored. Only a lost connection is an error.
func (w *marker) note(ctx context.Context) error {
	err := w.noter.note(ctx, w.publisher)
	if w.lost(ctx, err) {
		return err
	}
	if err != nil {
		w.reporter.trouble("what was stored cannot be noted: trying again", err)
	}
	return nil
}

// gather waits for work and lets a little more come. It reports false when the
// marker is to stop.
func (w *marker) gather(ctx context.Context) bool {
	retry := time.NewTimer(w.untilDue())
	defer retry.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-w.stop:
		return false
	case <-retry.C:
	case j := <-w.accept():
		w.take(j)
	case <-w.publisher.Stored():
		if w.publisher.Counts().Unreleased < markBatch {
			sleep.For(ctx, linger)
		}
	}
	w.takeAdded()
	w.takeStored()
	return true
}

// accept is nil, so that the reader waits, while too many tasks are under way.
func (w *marker) accept() <-chan *markTask {
	if len(w.tasks)+w.inLines >= jetstream.U {
		return nil
	}
	return w.in
}

func (w *marker) untilDue() time.Duration {
	wait := time.Hour
	for _, j := range w.tasks {
		wait = min(wait, time.Until(j.due))
	}
	for _, line := range w.lines {
		wait = min(wait, time.Until(line[0].due))
	}
	return max(wait, 0)
}

func (w *marker) take(j *markTask) {
	if !j.kind.records() {
		w.tasks = append(w.tasks, j)
		return
	}
	w.lines[j.of] = append(w.lines[j.of], j)
	w.inLines++
}

func (w *marker) takeAdded() {
	for {
		select {
		case j := <-w.accept():
			w.take(j)
		default:
			return
		}
	}
}

func (w *marker) newTask() *markTask {
	n := len(w.free)
	if n == 0 {
		return new(markTask)
	}
	j := w.free[n-1]
	w.free = w.free[:n-1]
	return j
}

// takeStored reports whether it has taken all there was.
func (w *marker) takeStored() bool {
	now := time.Now()
	w.taken = w.publisher.Take(w.taken[:0], takeBatch)
	for i := range w.taken {
		d := &w.taken[i]
		by, _ := d.Tag.(fallback.Waiter)
		trace, _ := d.Trace.(*rowTrace)
		if trace != nil {
			trace.published()
		}
		j := w.newTask()
		j.row.Ref, j.row.XID, j.row.Bytes, j.row.Key = d.Ref, d.XID, d.Bytes, d.Key
		j.sent, j.index, j.by, j.trace, j.begun, j.due = true, d.Index, by, trace, now, now
		w.tasks = append(w.tasks, j)
	}
	clear(w.taken) // it would keep what it refers to
	return len(w.taken) < takeBatch
}

// finish settles what is left, as far as ctx allows, after the publisher has drained.
// refusals are rows that JetStream itself refused.
func (w *marker) finish(ctx context.Context, refusals []publish.Refusal) {
	close(w.stop)
	<-w.done
	w.takeAdded()
	for !w.takeStored() {
		continue
	}
	now := time.Now()
	for _, x := range refusals {
		w.reporter.refused(x.Ref, x.EventType, x.Failure)
		j := &markTask{
			row:  table.Row{Ref: x.Ref, XID: x.XID, Failure: x.Failure.Error(), Wait: x.Failure.Wait},
			kind: toPark, of: fallback.Aggregate{Table: x.Ref.Table}, begun: now, due: now,
		}
		if by, ok := x.Tag.(fallback.PolledWaiter); ok {
			j.row.Polled, j.row.Attempts = true, by.FailedAttempts()
		}
		j.by, _ = x.Tag.(fallback.Waiter)
		w.holds.BeginRecord(j.of)
		w.take(j)
	}
	// A row that somebody has locked is not waited for: the recovery scan finds it.
	ctx, cancel := context.WithTimeout(ctx, finishTimeout)
	defer cancel()
	for len(w.tasks)+w.inLines > 0 && w.db.Alive() {
		if w.pass(ctx) != nil || !sleep.For(ctx, 5*time.Millisecond) {
			return
		}
	}
}
