package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// comparison of marks and stream: a row that is marked at or after T, and whose message the scan did not
// read, is lost. It is made pending again.
type comparison struct {
	reporter *reporter
	servers  *servers
	before   *compared // what the session before this one has compared, and then this one
	db       *table.DB
	wal      *stream.Session // nil where none is read
	info     *jetstream.StreamInfo
	notes    *notes
	marks    *marksRead
	trimmed  bool     // the scan wanted messages that the stream has dropped
	inserts  *inserts // nil where the WAL was not asked
	lost     int
	// incomplete are the outboxes of which some marks were not compared.
	incomplete map[*outbox.Table]bool
}

// runOnce returns how many rows the stream has lost. The session before this one may have compared, and
// ended because it had read the WAL for that: then its answer counts.
func (c *comparison) runOnce(ctx context.Context) (lost int, err error) {
	before := *c.before
	if *c.before = (compared{}); before.holds(c.info) {
		c.incomplete = before.incomplete
		return before.healed, nil
	}
	err = c.run(ctx)
	if c.inserts == nil {
		return c.lost, err
	}
	c.inserts.stop()
	if err == nil {
		*c.before = compared{c.info, c.lost, c.incomplete}
		err = errInsertsRead
	}
	return c.lost, err
}

func (c *comparison) run(ctx context.Context) error {
	switch m := c.marks; {
	case m.known && m.since.IsZero():
		c.lacks(c.servers.outboxes...)
		if m.early > 0 {
			c.reporter.alarm(alarm.ComparisonGivenUp, zap.String("detail",
				"the newest messages were stored long after their rows were marked, as if clocks differed"),
				zap.Int("rows", m.early), zap.Duration("apart", clocks))
		}
		return nil // every other row that was read back was pending until now
	case m.full:
		c.giveUp(m.since)
		c.lacks(c.servers.outboxes...)
		return nil
	}
	for _, t := range c.servers.outboxes {
		compare := c.compare
		if c.marks.first[t].IsZero() {
			compare = c.alarmUnreadable
		}
		if err := compare(ctx, t); err != nil {
			return err
		}
	}
	return nil
}

// lacks notes that marks of tables were not compared.
func (c *comparison) lacks(tables ...*outbox.Table) {
	if c.incomplete == nil {
		c.incomplete = map[*outbox.Table]bool{}
	}
	for _, t := range tables {
		c.incomplete[t] = true
	}
}

func (c *comparison) giveUp(since time.Time) {
	c.reporter.alarm(alarm.ComparisonGivenUp, zap.String("detail",
		"more rows carry late marks, or were changed, than are compared with the stream"),
		zap.Int("compared", len(c.marks.rows)), zap.Time("marked_since", since))
}

// tableLosses are the rows of one table that are marked and were not read back.
type tableLosses struct {
	lost        int
	first, last string // ids
	changed     map[string]struct{}
}

// add counts the rows of some lost ones that are pending again, each once: it may have had two marks.
func (f *tableLosses) add(lost []table.MarkedRow, pending map[string]struct{}) {
	for _, row := range lost {
		if _, ok := pending[row.ID]; !ok {
			continue
		}
		delete(pending, row.ID)
		if f.lost == 0 {
			f.first = row.ID
		}
		f.lost, f.last = f.lost+1, row.ID
	}
}

// compare makes the lost rows of a table pending again. They are delivered from the table, before any WAL
// is read.
func (c *comparison) compare(ctx context.Context, t *outbox.Table) error {
	found := tableLosses{changed: map[string]struct{}{}}
	deliveries, err := c.db.ReadDeliveries(ctx, t, c.servers.sent(t))
	if err != nil {
		return err
	}
	// Rows that are pending again are not found a second time, however this ends.
	defer func() { c.report(t, &found) }()
	for _, times := range c.notes.between(t, c.marks.sinceOf(t)) {
		if err := c.compareMarked(ctx, t, times, deliveries, &found); err != nil {
			return err
		}
	}
	return nil
}

func (c *comparison) compareMarked(
	ctx context.Context, t *outbox.Table, times marked, deliveries *table.Deliveries, found *tableLosses,
) error {
	since := times.from
	if c.trimmed { // of the rows that were marked together at that time, some may have been dropped
		since = since.Add(time.Microsecond)
	}
	var next table.MarkCursor
	for {
		marked, err := c.db.MarkedSince(ctx, t, since, &next, markBatch)
		if err != nil {
			return err
		}
		last := len(marked) < markBatch
		if early := markedBy(times.until, marked); len(early) < len(marked) {
			marked, last = early, true
		}
		lost, err := c.db.Here(ctx, deliveries, c.notRead(t, marked, found))
		if err != nil {
			return err
		}
		lost, full, err := c.leaveInserted(ctx, t, lost)
		if err != nil {
			return err
		}
		if full {
			c.giveUp(since)
			c.lacks(t)
			return nil
		}
		if err := c.heal(ctx, t, lost, found); err != nil {
			return err
		}
		if last {
			return nil
		}
	}
}

// markedBy cuts off the rows that were marked later, if until is set. They are sorted by their marks.
func markedBy(until time.Time, rows []table.MarkedRow) []table.MarkedRow {
	later := slices.IndexFunc(rows, func(row table.MarkedRow) bool { return row.Marked.After(until) })
	if until.IsZero() || later < 0 {
		return rows
	}
	return rows[:later]
}

// notRead leaves out of marked rows those that were read back, and counts those that were changed.
func (c *comparison) notRead(
	t *outbox.Table, marked []table.MarkedRow, found *tableLosses,
) []table.MarkedRow {
	return slices.DeleteFunc(slices.Clone(marked), func(row table.MarkedRow) bool {
		if c.marks.wasRead(row.Ref) {
			return true
		}
		_, ok := c.marks.changed[changed{t, row.ID}]
		if ok {
			found.changed[row.ID] = struct{}{}
		}
		return ok
	})
}

// heal makes rows pending again, once it is certain that the whole stream was read.
func (c *comparison) heal(
	ctx context.Context, t *outbox.Table, lost []table.MarkedRow, found *tableLosses,
) error {
	if len(lost) == 0 {
		return nil
	}
	if found.lost == 0 {
		if err := c.confirm(ctx); err != nil {
			return err
		}
	}
	pending, err := c.unmark(ctx, t, lost)
	found.add(lost, pending)
	if err == nil {
		crash.At("unmarked")
	}
	return err
}

func (c *comparison) report(t *outbox.Table, found *tableLosses) {
	if len(found.changed) > 0 && !c.reporter.limited("rows_changed/"+t.String(), time.Hour) {
		c.reporter.alarm(alarm.RowsChanged, zapTable(t), zap.Int("rows", len(found.changed)))
	}
	if found.lost == 0 {
		return
	}
	c.lost += found.lost
	c.reporter.metrics.lost.Add(float64(found.lost))
	c.reporter.alarm(alarm.EventsLost, zapTable(t), zap.Int("rows", found.lost),
		zap.String("first_id", found.first), zap.String("last_id", found.last))
}

// confirm fails unless the scan has read up to the stream's end. A leader that is cut off from the other
// servers may answer with less, and then rows look lost that are not.
func (c *comparison) confirm(ctx context.Context) error {
	info, err := c.servers.stream.Confirm(ctx)
	if err != nil {
		return err
	}
	if !info.Created.Equal(c.info.Created) || info.LastSeq < c.info.LastSeq {
		return errors.New("read the stream back: it is another one, or has lost messages, since")
	}
	more := jetstream.ScanOptions{
		Source: c.servers.envelope.Source(),
		Step: func(messages []jetstream.Message) (bool, error) {
			if len(messages) > 0 {
				return false, errors.New("read the stream back: it did not end where its leader said")
			}
			return true, nil
		},
	}
	return c.servers.stream.ScanForward(ctx, c.info.LastSeq+1, info.LastSeq, more)
}

// unmark waits for rows that are locked: nothing of their aggregates may be delivered before them. pending
// are the ids of the rows that are, even at an error.
func (c *comparison) unmark(
	ctx context.Context, t *outbox.Table, rows []table.MarkedRow,
) (pending map[string]struct{}, err error) {
	pending = make(map[string]struct{}, len(rows))
	for begun, named := time.Now(), false; ; {
		some, left, err := c.db.Unmark(ctx, t, rows)
		for _, row := range some {
			pending[row.ID] = struct{}{}
		}
		switch {
		case err != nil && (!waitsOut(err) || !c.db.Alive()):
			return pending, err
		case err != nil:
			c.reporter.trouble("rows that the stream has lost cannot be made pending: trying again",
				err, zapTable(t))
			if table.IsLocked(err) && time.Since(begun) > lockedAlarm {
				c.reporter.alarmLocked(ctx, c.db, rows[0].Ref,
					"the rows that the stream has lost, and everything behind them")
			}
		case len(left) == 0:
			c.reporter.over(lockedKind(t), alarm.RowLocked,
				zapTable(t))
			return pending, nil
		default:
			rows = left
			if !named && time.Since(begun) > lockedAlarm {
				named = true
				who, err := c.db.Blocker(ctx, t, rows[0].ID)
				if err != nil {
					who = err.Error()
				}
				c.reporter.alarm(alarm.RowLocked,
					zap.String("waiting", "a row that the stream has lost, and everything behind it"),
					zap.Stringer("row", rows[0].Ref), zap.String("holder", who))
			}
		}
		if !sleep.For(ctx, 200*time.Millisecond) {
			return pending, ctx.Err()
		}
	}
}

// alarmUnreadable: the table has marks of the time that was read back, and no message
// of one of its rows was.
func (c *comparison) alarmUnreadable(ctx context.Context, t *outbox.Table) error {
	some := false
	for _, times := range c.notes.between(t, c.marks.since) {
		// Archived rows are not compared.
		rows, err := c.db.MarkedSince(ctx, t, times.from, &table.MarkCursor{}, 1)
		if err != nil {
			return err
		}
		some = some || len(markedBy(times.until, rows)) > 0
	}
	if !some {
		return nil
	}
	c.lacks(t)
	c.reporter.alarm(alarm.NothingToCompare, zapTable(t))
	return nil
}
