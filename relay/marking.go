package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// pass tries every task that is due, once. What an error leaves undone stays a
// task.
func (w *marker) pass(ctx context.Context) error {
	err := w.record(ctx)
	now := time.Now()
	var later []*markTask
	batches := map[batchKey][]*markTask{}
	for _, j := range w.tasks {
		if j.due.After(now) {
			later = append(later, j)
			continue
		}
		key := batchKey{table: j.row.Ref.Table, kind: j.kind}
		if j.alone {
			key.alone = j
		}
		batches[key] = append(batches[key], j)
	}
	w.tasks = later
	for key, tasks := range batches {
		for part := range slices.Chunk(tasks, markBatch) {
			if err != nil {
				w.tasks = append(w.tasks, part...) // for finish
				continue
			}
			err = w.mark(ctx, batchKey{table: key.table, kind: key.kind}, part)
		}
	}
	w.reserve()
	return err
}

type batchKey struct {
	table *outbox.Table
	kind  taskKind
	alone *markTask // a row that broke a statement has one to itself
}

// mark marks rows of one table, or notes that they were inserted so, each for itself where one of
// them is refused. What it leaves undone it puts back.
func (w *marker) mark(ctx context.Context, key batchKey, tasks []*markTask) error {
	verdicts, err := w.statement(ctx, key, tasks)
	for _, j := range tasks {
		j.failed = j.failed || err != nil
	}
	switch {
	case w.lost(ctx, err):
		w.tasks = append(w.tasks, tasks...) // for finish
		return err
	case err != nil && len(tasks) > 1 && endsStatement(err):
		half := len(tasks) / 2
		return errors.Join(w.mark(ctx, key, tasks[:half]), w.mark(ctx, key, tasks[half:]))
	case err != nil:
		w.brokeDown(ctx, tasks, err)
		w.tasks = append(w.tasks, tasks...)
		return nil
	}
	w.sayUnlocked(key.table)
	done := make([]*markTask, 0, len(tasks))
	for i, j := range tasks {
		switch v := verdicts[i]; {
		case v == table.Gone && key.table.Partitioned && !j.gone:
			j.gone = true // its partition may have been attached again while the statement ran
			j.later(5 * time.Millisecond)
			w.tasks = append(w.tasks, j)
		case v == table.Gone:
			w.alarmDeleted(j)
			fallthrough
		case v == table.Done:
			done = append(done, j)
		default:
			w.postpone(ctx, j, v)
			w.tasks = append(w.tasks, j)
		}
	}
	w.settled(done)
	return nil
}

// deletedByProducer is how long after its PubAck a row that is gone counts as deleted by its producer.
const deletedByProducer = time.Minute

// alarmDeleted raises an alarm where a row that this session has stored is gone before its mark. A row that
// was read back, or was in a statement that has failed, may have been deleted by its mark.
func (w *marker) alarmDeleted(j *markTask) {
	t := j.row.Ref.Table
	if !j.sent || j.failed || time.Since(j.begun) >= deletedByProducer {
		return
	}
	kind := "rows_deleted/" + t.String()
	if w.reporter.limited(kind, factsAgain) {
		return
	}
	w.reporter.alarm(alarm.RowsDeleted,
		zap.Stringer("row", j.row.Ref), zapTable(t), w.reporter.leftOut(kind), zap.String("hint",
			"drop the DELETE in the producer (Quarkus: "+
				"quarkus.debezium-outbox.remove-after-insert=false), and let the relay take the rows away, "+
				"with mark: delete or journal: docs/TABLES.md#producers-that-delete-their-rows"))
}

// lost reports whether an error is the connection's or the session's end.
func (w *marker) lost(ctx context.Context, err error) bool {
	return err != nil && (!w.db.Alive() || ctx.Err() != nil || failureOf(inSettling, err).outcome == endTerm)
}

func (w *marker) statement(ctx context.Context, key batchKey, tasks []*markTask) ([]table.Verdict, error) {
	rows := w.rows[:0]
	for _, j := range tasks {
		rows = append(rows, j.row)
	}
	w.rows = rows
	switch key.kind {
	case toPark:
		crash.At("failed")
		defer crash.At("parked")
		return w.db.Park(ctx, key.table, rows, w.retry)
	case toHold:
		crash.At("holding")
		defer crash.At("held")
		return w.db.Hold(ctx, key.table, rows)
	case toNote:
		return w.db.NoteInserted(ctx, key.table, rows)
	}
	crash.At("stored")
	defer crash.At("marked")
	return w.db.Mark(ctx, key.table, rows)
}

// brokeDown tries again later what the database would not do.
func (w *marker) brokeDown(ctx context.Context, tasks []*markTask, err error) {
	wait, f := 250*time.Millisecond, failureOf(inSettling, err)
	if f.outcome == endStatement {
		tasks[0].alone, wait = true, 5*time.Second
		w.refuse(tasks[0])
		if !w.reporter.limited("row_unsettled", 30*time.Second) {
			w.reporter.alarm(alarm.RowUnsettled, zap.Stringer("row", tasks[0].row.Ref), zap.Error(err))
		}
	}
	w.reporter.trouble("rows cannot be settled: trying again", err, zapTable(tasks[0].row.Ref.Table))
	if f.alarm == alarm.RowLocked && time.Since(tasks[0].begun) >= lockedAlarm {
		w.reporter.alarmLocked(ctx, w.db, tasks[0].row.Ref,
			"the marks and records of rows; the slot waits for them")
	}
	for _, j := range tasks {
		j.later(wait)
	}
}

// sayUnlocked ends what brokeDown has said of a table's lock.
func (w *marker) sayUnlocked(t *outbox.Table) {
	w.reporter.over(lockedKind(t), alarm.RowLocked, zapTable(t))
}

// postpone tries again later what is not visible yet, or locked.
func (w *marker) postpone(ctx context.Context, j *markTask, v table.Verdict) {
	if v == table.Invisible {
		if since := time.Since(j.begun); since > slowStep {
			w.reporter.trouble("a row cannot be marked or recorded: its transaction is flushed and not "+
				"visible yet, as where a commit waits for a synchronous standby",
				fmt.Errorf("row %s, for %s", j.row.Ref, since.Round(time.Second)))
		}
		j.later(5 * time.Millisecond)
		return
	}
	j.later(50 * time.Millisecond)
	if !j.kind.records() || w.lines[j.of][0] == j { // the others wait for the first of their line
		w.nameBlocker(ctx, j)
	}
}

// later sets the task's next try, each time a little later than before, but never
// much: a lock's end should not go unnoticed.
func (j *markTask) later(least time.Duration) {
	j.wait = max(least, min(2*j.wait, 500*time.Millisecond))
	j.due = time.Now().Add(j.wait)
}

// settled tells everybody who waits for one of the rows.
func (w *marker) settled(tasks []*markTask) {
	w.out = w.out[:0]
	for _, j := range tasks {
		if j.sent {
			w.out = append(w.out, j.index)
		}
	}
	w.publisher.Release(w.out)
	w.mu.Lock()
	for _, j := range tasks {
		if w.waiting[j.row.Ref] == j {
			delete(w.waiting, j.row.Ref)
		}
		if j.kind.records() {
			if w.recording[j.row.Ref]--; w.recording[j.row.Ref] <= 0 {
				delete(w.recording, j.row.Ref)
			}
		}
	}
	w.mu.Unlock()
	for _, j := range tasks {
		w.sayOver(j)
		if j.kind.records() {
			w.holds.EndRecord(j.of)
		}
		if j.kind == toPark {
			w.parked()
		}
		if j.by != nil {
			j.by.Settled()
		}
		if j.trace != nil {
			j.trace.marked()
		}
		for _, by := range j.others {
			by.Settled()
		}
		if j.sent && j.kind == toMark && len(w.free) < markBatch {
			*j = markTask{}
			w.free = append(w.free, j)
		}
	}
}

// reserve tells the publisher how far before its first message the oldest message
// lies whose row is not marked.
func (w *marker) reserve() {
	w.mu.Lock()
	var behind uint64
	for _, j := range w.waiting {
		behind = max(behind, j.behind)
	}
	w.mu.Unlock()
	w.publisher.Reserve(behind)
}

// nameBlocker says once who holds a row that stays locked.
func (w *marker) nameBlocker(ctx context.Context, j *markTask) {
	if j.named || time.Since(j.begun) < lockedAlarm {
		return
	}
	j.named = true
	who, err := w.db.Blocker(ctx, j.row.Ref.Table, j.row.Ref.ID)
	if err != nil {
		who = err.Error()
	}
	waits := "the mark of a stored row; the relay stops some thousand messages later"
	if j.kind != toMark {
		waits = "the record of a row that failed, is held or was inserted as processed; the slot waits for it"
	}
	if who == table.Unlocked {
		if !j.unlocked { // the lock may have ended just now
			j.unlocked, j.named = true, false
			return
		}
		w.refuse(j)
		if !w.reporter.limited("row_unsettled", 30*time.Second) {
			w.reporter.alarm(alarm.RowUnsettled, zap.Stringer("row", j.row.Ref), zap.String("detail",
				"a trigger of the table suppresses the mark or the record, or takes it back"))
		}
		return
	}
	j.locked = true
	w.reporter.alarm(alarm.RowLocked, zap.String("waiting", waits),
		zap.Stringer("row", j.row.Ref), zap.String("holder", who))
}

func (w *marker) refuse(j *markTask) {
	if !j.refused {
		j.refused = true
		w.refused++
	}
}

// sayOver ends what alarms have said of a row that is settled now.
func (w *marker) sayOver(j *markTask) {
	if j.locked {
		w.reporter.ended(alarm.RowLocked, zap.Stringer("row", j.row.Ref))
	}
	if !j.refused {
		return
	}
	if w.refused--; w.refused == 0 {
		w.reporter.over("row_unsettled", alarm.RowUnsettled, zap.Stringer("last", j.row.Ref))
	}
}
