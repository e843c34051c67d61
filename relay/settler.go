package relay

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

const (
	settleBatch = 1000
	// linger lets marks gather: a mark is a commit, and nobody waits for it but
	// the WAL's end.
	linger = 10 * time.Millisecond
	// backlog bounds what the reader has handed over and the settler not taken.
	backlog = 256
	// finishTimeout bounds the last tries of an ending session.
	finishTimeout = 2 * time.Second
	// lockedAlarm is how long a row may stay locked before its holder is named.
	lockedAlarm = 5 * time.Second
)

// task is what is to be done with a row.
type task uint8

const (
	toMark task = iota // it is stored
	toPark             // it has failed
	toHold             // it waits behind a row that has
)

// waiter is told when a row is settled: a transaction of the WAL, or a pass of the
// loop.
type waiter interface{ Settled() }

// job is one row on its way to be settled.
type job struct {
	row      fallback.Row
	task     task
	of       aggregate         // of a row that is recorded
	delivery *publish.Delivery // nil where the row is not in the lane
	waiters  []waiter
	behind   uint64 // of a row that was read back
	begun    time.Time
	due      time.Time
	wait     time.Duration
	named    bool // the lock's holder was
	alone    bool // it has broken a statement
}

// settler marks what was stored and records what failed, in batches, and tells
// the trackers. What cannot be settled yet is tried again, for ever.
type settler struct {
	r     *Relay
	db    *fallback.DB
	lane  *publish.Lane
	holds *holds
	// parked is called when a failure is recorded.
	parked func()
	in     chan *job
	stop   chan struct{}
	done   chan struct{}

	// waiting holds the rows that were read back and are not marked yet, recording
	// those that are being recorded. mu guards both: the reader and the loop add,
	// the settler takes out.
	mu        sync.Mutex
	waiting   map[outbox.Ref]*job
	recording map[outbox.Ref]int

	// jobs and lines are the settler's own: what it has taken and not settled yet.
	// Rows that are to be recorded stand in line, aggregate by aggregate: none is
	// recorded before an earlier one, or a crash between the two would let the later
	// one be sent first.
	jobs    []*job
	lines   map[aggregate][]*job
	inLines int
}

func newSettler(r *Relay, db *fallback.DB, lane *publish.Lane, h *holds, s *seen) *settler {
	w := &settler{
		r: r, db: db, lane: lane, holds: h, parked: func() {}, in: make(chan *job, backlog), stop: make(chan struct{}), done: make(chan struct{}),
		waiting: map[outbox.Ref]*job{}, recording: map[outbox.Ref]int{}, lines: map[aggregate][]*job{},
	}
	now := time.Now()
	for ref, behind := range s.unmarked {
		j := &job{row: fallback.Row{Ref: ref}, behind: behind + 1, begun: now, due: now}
		w.waiting[ref] = j
		w.jobs = append(w.jobs, j)
	}
	w.reserve()
	return w
}

// stored has a row marked that was read back from the stream and that the WAL or
// the table brings again, and lets the waiter wait for it.
func (w *settler) stored(ctx context.Context, row fallback.Row, behind uint64, by waiter) error {
	w.mu.Lock()
	if j := w.waiting[row.Ref]; j != nil {
		j.waiters = append(j.waiters, by)
		w.mu.Unlock()
		return nil
	}
	j := &job{row: row, waiters: []waiter{by}, behind: behind + 1}
	w.waiting[row.Ref] = j
	w.mu.Unlock()
	return w.add(ctx, j)
}

// park has a failure recorded.
func (w *settler) park(ctx context.Context, row fallback.Row, of aggregate, by waiter) error {
	w.holds.record(of)
	return w.enlist(ctx, &job{row: row, task: toPark, of: of, waiters: []waiter{by}})
}

// hold has it recorded that a row waits. Its aggregate's hold counts it already.
func (w *settler) hold(ctx context.Context, row fallback.Row, of aggregate, by waiter) error {
	return w.enlist(ctx, &job{row: row, task: toHold, of: of, waiters: []waiter{by}})
}

func (w *settler) enlist(ctx context.Context, j *job) error {
	w.mu.Lock()
	w.recording[j.row.Ref]++
	w.mu.Unlock()
	return w.add(ctx, j)
}

// busy calls each with every row that is to be marked or recorded and is not in
// the lane.
func (w *settler) busy(each func(outbox.Ref)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for ref := range w.waiting {
		each(ref)
	}
	for ref := range w.recording {
		each(ref)
	}
}

// add waits while too many jobs are under way.
func (w *settler) add(ctx context.Context, j *job) error {
	j.begun = time.Now()
	j.due = j.begun
	select {
	case w.in <- j:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run settles until finish is called or the database fails.
func (w *settler) run(ctx context.Context) error {
	defer close(w.done)
	for {
		if !w.gather(ctx) {
			return nil
		}
		if err := w.pass(ctx); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
}

// gather waits for work and lets a little more come. It reports false when the
// settler is to stop.
func (w *settler) gather(ctx context.Context) bool {
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
	case <-w.lane.Stored():
		if w.lane.Counts().Unsettled < settleBatch {
			sleep(ctx, linger)
		}
	}
	w.takeAdded()
	w.takeStored()
	return true
}

// accept is nil, so that the reader waits, while too many jobs are under way.
func (w *settler) accept() <-chan *job {
	if len(w.jobs)+w.inLines >= publish.U {
		return nil
	}
	return w.in
}

func (w *settler) untilDue() time.Duration {
	wait := time.Hour
	for _, j := range w.jobs {
		wait = min(wait, time.Until(j.due))
	}
	for _, line := range w.lines {
		wait = min(wait, time.Until(line[0].due))
	}
	return max(wait, 0)
}

func (w *settler) take(j *job) {
	if j.task == toMark {
		w.jobs = append(w.jobs, j)
		return
	}
	w.lines[j.of] = append(w.lines[j.of], j)
	w.inLines++
}

func (w *settler) takeAdded() {
	for {
		select {
		case j := <-w.accept():
			w.take(j)
		default:
			return
		}
	}
}

func (w *settler) takeStored() {
	now := time.Now()
	deliveries := w.lane.Take(nil, publish.U)
	for i := range deliveries {
		d := &deliveries[i]
		j := &job{row: fallback.Row{Ref: d.Ref, XID: d.XID}, delivery: d, begun: now, due: now}
		if by, ok := d.Tag.(waiter); ok {
			j.waiters = []waiter{by}
		}
		if d.Ref.Table.Mark == outbox.MarkNone {
			w.settled(j)
			continue
		}
		w.jobs = append(w.jobs, j)
	}
}

// pass tries every job that is due, once. What an error leaves undone stays a
// job.
func (w *settler) pass(ctx context.Context) error {
	err := w.record(ctx)
	now := time.Now()
	var later []*job
	batches := map[batchKey][]*job{}
	for _, j := range w.jobs {
		if j.due.After(now) {
			later = append(later, j)
			continue
		}
		key := batchKey{table: j.row.Ref.Table}
		if j.alone {
			key.alone = j
		}
		batches[key] = append(batches[key], j)
	}
	w.jobs = later
	for key, jobs := range batches {
		for part := range slices.Chunk(jobs, settleBatch) {
			if err == nil {
				err = w.mark(ctx, key.table, part)
			}
			if err != nil {
				w.jobs = append(w.jobs, part...) // for finish
			}
		}
	}
	w.reserve()
	return err
}

type batchKey struct {
	table *outbox.Table
	task  task
	alone *job // a row that broke a statement has one to itself
}

// mark marks rows of one table, each for itself where one of them is refused.
func (w *settler) mark(ctx context.Context, t *outbox.Table, jobs []*job) error {
	verdicts, err := w.statement(ctx, batchKey{table: t}, jobs)
	switch {
	case w.lost(ctx, err):
		return err
	case err != nil && len(jobs) > 1 && !fallback.Passing(err):
		half := len(jobs) / 2
		return errors.Join(w.mark(ctx, t, jobs[:half]), w.mark(ctx, t, jobs[half:]))
	case err != nil:
		w.brokeDown(jobs, err)
		w.jobs = append(w.jobs, jobs...)
		return nil
	}
	for i, j := range jobs {
		if verdicts[i] == fallback.Done {
			w.settled(j)
			continue
		}
		w.postpone(ctx, j, verdicts[i])
		w.jobs = append(w.jobs, j)
	}
	return nil
}

// record records what stands at the head of every line.
func (w *settler) record(ctx context.Context) error {
	now := time.Now()
	batches := map[batchKey][][]*job{}
	for of, line := range w.lines {
		if line[0].due.After(now) {
			continue
		}
		n := 1
		for n < min(len(line), settleBatch) && line[n].task == line[0].task {
			n++
		}
		key := batchKey{table: of.table, task: line[0].task}
		batches[key] = append(batches[key], line[:n])
	}
	for key, lines := range batches {
		for len(lines) > 0 {
			n, rows := 0, 0
			for n < len(lines) && (n == 0 || rows+len(lines[n]) <= settleBatch) {
				rows += len(lines[n])
				n++
			}
			if err := w.recordLines(ctx, key, lines[:n]); err != nil {
				return err
			}
			lines = lines[n:]
		}
	}
	return nil
}

// recordLines records rows in one statement, or line by line, and row by row,
// where one of them is refused.
func (w *settler) recordLines(ctx context.Context, key batchKey, lines [][]*job) error {
	jobs := slices.Concat(lines...)
	for n, line := range lines {
		for _, j := range line {
			j.row.Line = n
		}
	}
	verdicts, err := w.statement(ctx, key, jobs)
	switch {
	case w.lost(ctx, err):
		return err
	case err != nil && len(jobs) > 1 && !fallback.Passing(err):
		return w.recordApart(ctx, key, lines)
	case err != nil:
		w.brokeDown(jobs, err)
		return nil
	}
	for i, j := range jobs {
		if verdicts[i] != fallback.Done {
			w.postpone(ctx, j, verdicts[i])
			continue
		}
		w.leave(j)
		w.settled(j)
	}
	return nil
}

// leave takes a job out of its line. As a rule it is the first; rows without an
// aggregate may leave in any order.
func (w *settler) leave(j *job) {
	line := w.lines[j.of]
	switch i := slices.Index(line, j); {
	case len(line) == 1:
		delete(w.lines, j.of)
	case i == 0:
		w.lines[j.of] = line[1:]
	default:
		w.lines[j.of] = slices.Concat(line[:i], line[i+1:]) // a copy: somebody walks along the line
	}
	w.inLines--
}

func (w *settler) recordApart(ctx context.Context, key batchKey, lines [][]*job) error {
	if len(lines) > 1 {
		for _, line := range lines {
			if err := w.recordLines(ctx, key, [][]*job{line}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, j := range lines[0] {
		if err := w.recordLines(ctx, key, [][]*job{{j}}); err != nil {
			return err
		}
		if line := w.lines[j.of]; len(line) > 0 && line[0] == j {
			return nil // the others wait for it
		}
	}
	return nil
}

// lost reports whether an error is the connection's or the session's end.
func (w *settler) lost(ctx context.Context, err error) bool {
	return err != nil && (!w.db.Alive() || ctx.Err() != nil)
}

func (w *settler) statement(ctx context.Context, key batchKey, jobs []*job) ([]fallback.Verdict, error) {
	rows := make([]fallback.Row, len(jobs))
	for i, j := range jobs {
		rows[i] = j.row
	}
	switch key.task {
	case toPark:
		crash("failed")
		defer crash("parked")
		return w.db.Park(ctx, key.table, rows, w.r.cfg.Retry)
	case toHold:
		crash("holding")
		defer crash("held")
		return w.db.Hold(ctx, key.table, rows)
	}
	crash("stored")
	defer crash("marked")
	return w.db.Mark(ctx, key.table, rows)
}

// brokeDown tries again later what the database would not do.
func (w *settler) brokeDown(jobs []*job, err error) {
	wait := 250 * time.Millisecond
	if !fallback.Passing(err) {
		jobs[0].alone, wait = true, 5*time.Second
		if !w.r.limited("row_unsettled", 30*time.Second) {
			w.r.alarm("row_unsettled", "the database refuses the mark or the record of a row: the slot waits for it",
				zap.Stringer("row", jobs[0].row.Ref), zap.Error(err))
		}
	}
	w.r.trouble("rows cannot be settled: trying again", err, zapTable(jobs[0].row.Ref.Table))
	for _, j := range jobs {
		j.later(wait)
	}
}

// postpone tries again later what is not visible yet, or locked.
func (w *settler) postpone(ctx context.Context, j *job, v fallback.Verdict) {
	if v == fallback.Invisible {
		j.later(5 * time.Millisecond)
		return
	}
	j.later(50 * time.Millisecond)
	if j.task == toMark || w.lines[j.of][0] == j { // the others wait for the first of their line
		w.nameBlocker(ctx, j)
	}
}

// later sets the job's next try, each time a little later than before, but never
// much: a lock's end should not go unnoticed.
func (j *job) later(least time.Duration) {
	j.wait = max(least, min(2*j.wait, 500*time.Millisecond))
	j.due = time.Now().Add(j.wait)
}

// settled tells everybody who waits for the row.
func (w *settler) settled(j *job) {
	if j.delivery != nil {
		w.lane.Settled([]publish.Delivery{*j.delivery})
	}
	w.mu.Lock()
	if w.waiting[j.row.Ref] == j {
		delete(w.waiting, j.row.Ref)
	}
	if j.task != toMark {
		if w.recording[j.row.Ref]--; w.recording[j.row.Ref] <= 0 {
			delete(w.recording, j.row.Ref)
		}
	}
	waiters := j.waiters
	w.mu.Unlock()
	if j.task != toMark {
		w.holds.recorded(j.of)
	}
	if j.task == toPark {
		w.parked()
	}
	for _, by := range waiters {
		by.Settled()
	}
}

// reserve tells the lane how far before its first message the oldest message
// lies whose row is not marked.
func (w *settler) reserve() {
	w.mu.Lock()
	var behind uint64
	for _, j := range w.waiting {
		behind = max(behind, j.behind)
	}
	w.mu.Unlock()
	w.lane.Reserve(behind)
}

// nameBlocker says once who holds a row that stays locked.
func (w *settler) nameBlocker(ctx context.Context, j *job) {
	if j.named || time.Since(j.begun) < lockedAlarm {
		return
	}
	j.named = true
	who, err := w.db.Blocker(ctx, j.row.Ref.Table, j.row.Ref.ID)
	if err != nil {
		who = err.Error()
	}
	message := "a stored row is locked by another session and cannot be marked; the relay stops some thousand messages later"
	if j.task != toMark {
		message = "a row that is to be recorded as failed or held is locked by another session; the slot waits for it"
	}
	w.r.alarm("row_locked", message,
		zap.Stringer("row", j.row.Ref), zap.String("holder", who))
}

// finish settles what is left, as far as ctx allows, after the lane has drained.
// refusals are rows that JetStream itself refused.
func (w *settler) finish(ctx context.Context, refusals []publish.Refusal) {
	close(w.stop)
	<-w.done
	w.takeAdded()
	w.takeStored()
	now := time.Now()
	for _, x := range refusals {
		if x.Ref.Table.Mark == outbox.MarkNone {
			continue // there is no row to record it in: see Relay.poison
		}
		w.r.refused(x.Ref, x.EventType, x.Failure)
		j := &job{row: fallback.Row{Ref: x.Ref, XID: x.XID, Failure: x.Failure.Error(), Wait: x.Failure.Wait}, task: toPark, of: aggregate{table: x.Ref.Table}, begun: now, due: now}
		if polled, ok := x.Tag.(*polled); ok {
			j.row.Polled, j.row.Attempts = true, polled.attempts
		}
		if by, ok := x.Tag.(waiter); ok {
			j.waiters = []waiter{by}
		}
		w.take(j)
	}
	// A row that somebody has locked is not waited for: the read-back finds it.
	ctx, cancel := context.WithTimeout(ctx, finishTimeout)
	defer cancel()
	for len(w.jobs)+w.inLines > 0 && w.db.Alive() {
		if w.pass(ctx) != nil || !sleep(ctx, 5*time.Millisecond) {
			return
		}
	}
}
