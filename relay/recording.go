package relay

import (
	"context"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/table"
)

const (
	// recordBytes bounds what the rows of a statement hold: a dead letter is a copy.
	recordBytes = 1 << 20
	// recordTime is how long rows are recorded before those that are stored are marked.
	recordTime = 250 * time.Millisecond
)

// record records what stands at the head of every line, or a part of it.
func (w *marker) record(ctx context.Context) error {
	now := time.Now()
	batches := map[batchKey][][]*markTask{}
	for of, line := range w.lines {
		if line[0].due.After(now) {
			continue
		}
		n := 1
		for n < min(len(line), markBatch) && line[n].kind == line[0].kind {
			n++
		}
		key := batchKey{table: of.Table, kind: line[0].kind}
		batches[key] = append(batches[key], line[:n])
	}
	for key, lines := range batches {
		for len(lines) > 0 && time.Since(now) < recordTime {
			n, rows, bytes := 0, 0, 0
			for n < len(lines) && (n == 0 || rows+len(lines[n]) <= markBatch && bytes <= recordBytes) {
				for _, j := range lines[n] {
					bytes += j.row.Bytes
				}
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
func (w *marker) recordLines(ctx context.Context, key batchKey, lines [][]*markTask) error {
	tasks := slices.Concat(lines...)
	for n, line := range lines {
		for _, j := range line {
			j.row.Line = n
		}
	}
	verdicts, err := w.statement(ctx, key, tasks)
	switch {
	case w.lost(ctx, err):
		return err
	case err != nil && len(tasks) > 1 && (endsStatement(err) || table.TooLong(err)):
		return w.recordApart(ctx, key, lines)
	case err != nil:
		w.brokeDown(ctx, tasks, err)
		return nil
	}
	w.sayUnlocked(key.table)
	for i, j := range tasks {
		if verdicts[i] != table.Done {
			w.postpone(ctx, j, verdicts[i])
			continue
		}
		if key.kind == toPark && (!key.table.Layout.Records() || j.row.Attempts >= w.retry.MaxAttempts) {
			w.reporter.deadLetter(j.row.Ref, j.row.Failure)
		}
		w.leave(j)
		w.settled([]*markTask{j})
	}
	return nil
}

// leave takes a task out of its line. Rows of an aggregate leave in their order, others in any order.
func (w *marker) leave(j *markTask) {
	line := w.lines[j.of]
	switch i := slices.Index(line, j); {
	case len(line) == 1:
		delete(w.lines, j.of)
	case i == 0:
		w.lines[j.of] = line[1:]
	default:
		w.lines[j.of] = slices.Concat(line[:i], line[i+1:]) // a copy: recordApart ranges over the line
	}
	w.inLines--
}

func (w *marker) recordApart(ctx context.Context, key batchKey, lines [][]*markTask) error {
	if len(lines) > 1 {
		for _, line := range lines {
			if err := w.recordLines(ctx, key, [][]*markTask{line}); err != nil {
				return err
			}
		}
		return nil
	}
	for _, j := range lines[0] {
		if err := w.recordLines(ctx, key, [][]*markTask{{j}}); err != nil {
			return err
		}
		if line := w.lines[j.of]; len(line) > 0 && line[0] == j {
			return nil // the others wait for it
		}
	}
	return nil
}
