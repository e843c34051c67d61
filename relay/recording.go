package relay

import (
	"context"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/table"
)

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
	case err != nil && len(jobs) > 1 && (!table.Passing(err) || table.TooLong(err)):
		return w.recordApart(ctx, key, lines)
	case err != nil:
		w.brokeDown(jobs, err)
		return nil
	}
	for i, j := range jobs {
		if verdicts[i] != table.Done {
			w.postpone(ctx, j, verdicts[i])
			continue
		}
		if key.task == toPark && (!key.table.Layout.Records() || j.row.Attempts >= w.retry.MaxAttempts) {
			w.reporter.buried(j.row.Ref, j.row.Failure)
		}
		w.leave(j)
		w.settled([]*job{j})
	}
	return nil
}

// leave takes a job out of its line. Rows of an aggregate leave in their order, others in any order.
func (w *settler) leave(j *job) {
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
