package retention

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// deleteRows deletes the processed rows of outboxes that have no archive.
func (r *pass) deleteRows(ctx context.Context) error {
	var all []error
	for i, t := range r.opts.Tables {
		if ctx.Err() != nil || !r.db.Alive() {
			break
		}
		if table.Journals(t) {
			partitioned, err := r.forget(ctx, t)
			if all = append(all, err); partitioned {
				continue // old rows have gone with their partitions
			}
		}
		from, err := r.keepMonths(ctx, t)
		if all = append(all, err); err == nil && from != "" {
			all = append(all, r.deleteFrom(ctx, t, from, &r.report.Tables[i]))
		}
	}
	return errors.Join(all...)
}

// keepMonths creates and drops months of an outbox that has any. A month goes when it is over and all of its
// rows have gone, or, where old rows are deleted, are so old. It returns the table of which old rows are to
// be deleted one by one, quoted, or "".
func (r *pass) keepMonths(ctx context.Context, t *outbox.Table) (from string, err error) {
	var m *monthly
	if !table.Journals(t) && t.Layout.Has(outbox.OccurredAt) {
		m, err = r.readMonthly(ctx, t.SQL(), t.Layout.Columns[outbox.OccurredAt])
		if err != nil {
			return "", err
		}
	}
	archived := table.IsArchived(t) && (m == nil || r.opts.ArchiveAfter > 0)
	deletes := r.opts.DeleteAfter > 0 && table.MarkOf(t).Stays() && !archived
	if deletes {
		from = t.SQL()
	}
	if m == nil || !r.mayAlter(m.Table) {
		return from, nil
	}
	if err := r.createAhead(ctx, m); err != nil {
		return "", fmt.Errorf("create months of %s: %w", t, err)
	}
	old := oldMonths{before: r.now, keeps: "true"}
	if deletes {
		from = m.Default
		old.before = r.now.Add(-r.opts.DeleteAfter)
		old.keeps = fmt.Sprintf("(%s AND t.%s < $1) IS NOT TRUE",
			table.MarkedSQL(t, "t"), t.Column(outbox.ProcessedAt))
	}
	return from, r.dropMonths(ctx, m, old)
}

// forget deletes what the journal has of pending rows that are gone, and looks after partitions.
func (r *pass) forget(ctx context.Context, t *outbox.Table) (partitioned bool, err error) {
	if err = r.db.Complete(ctx, t); err == nil {
		err = r.db.ForgetDeferred(ctx, t)
	}
	if err != nil {
		return false, fmt.Errorf("delete deferrals of rows of %s that are gone: %w", t, err)
	}
	return r.keepRanges(ctx, t)
}

// deleteFrom deletes rows that are marked and fit the outbox. It first checks that an index leads to them.
func (r *pass) deleteFrom(ctx context.Context, t *outbox.Table, from string, report *TableReport) error {
	if table.Journals(t) {
		return r.explainDelete(t, r.deleteJournaled(ctx, t, report))
	}
	indexed, err := r.isIndexed(ctx, t)
	if err != nil {
		return err
	}
	if !indexed {
		report.Skipped, report.Obstacle = missingIndex(t), true
		return nil
	}
	if err := r.db.Complete(ctx, t); err != nil {
		return err
	}
	refused := &refusedRows{table: t}
	err = r.sweep(ctx, sweep{
		from: from, column: t.Column(outbox.ProcessedAt), before: r.now.Add(-r.opts.DeleteAfter),
		count: &report.Deleted, id: t.Column(outbox.ID), refused: refused.add,
		ahead: func(context.Context, pgtype.Timestamptz, int) (string, error) {
			return " AND " + table.MarkedSQL(t, "t") + table.FilterSQL(t, "t") + refused.sql(), nil
		},
	})
	if len(refused.ids) > 0 {
		report.Refused += int64(len(refused.ids))
		err = errors.Join(err, fmt.Errorf("delete rows of %s: %d stay, the first has id %s: %w",
			t, len(refused.ids), refused.ids[0], refused.first))
	}
	return r.explainDelete(t, err)
}

func (r *pass) explainDelete(t *outbox.Table, err error) error {
	switch {
	case pg.Code(err) == pgerrcode.InsufficientPrivilege:
		return hint.Wrap(fmt.Errorf("delete rows of %s: %w", t, err), fmt.Sprintf(
			"as the table's owner: GRANT SELECT, DELETE ON %s TO %s", t.SQL(), r.role))
	case err != nil:
		return r.settle(fmt.Errorf("delete rows of %s: %w", t, err))
	}
	return nil
}

// deleteJournaled deletes rows whose marks stand in the journal, with their entries.
func (r *pass) deleteJournaled(ctx context.Context, t *outbox.Table, report *TableReport) error {
	detached, err := r.db.Detached(ctx, t)
	if err != nil {
		return err
	}
	if len(detached) > 0 {
		r.note("%s may be a detached partition of %s: no row is deleted before it is attached, dropped, or "+
			"has another column", detached[0], t)
	}
	before := r.now.Add(-r.opts.DeleteAfter)
	for entries := 1; ; {
		start := time.Now()
		found, rows, err := r.db.DeleteJournaled(ctx, t, before, entries)
		if err != nil {
			return err
		}
		report.Deleted += rows
		if r.opts.Progress != nil {
			r.opts.Progress(r.report)
		}
		if found < entries {
			return nil
		}
		took := time.Since(start)
		entries = nextBatch(entries, took)
		if err := pause(ctx, took); err != nil {
			return err
		}
	}
}

// isIndexed reports whether an index leads to the rows that were processed long ago.
func (r *pass) isIndexed(ctx context.Context, t *outbox.Table) (indexed bool, err error) {
	err = r.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		return conn.QueryRow(ctx, indexedSQL, t.SQL(), t.Layout.Columns[outbox.ProcessedAt]).Scan(&indexed)
	})
	if err != nil {
		return false, fmt.Errorf("read indexes of %s: %w", t, err)
	}
	return indexed, nil
}

func missingIndex(t *outbox.Table) string {
	return fmt.Sprintf("no index begins with %s: "+
		"CREATE INDEX CONCURRENTLY ON %s (%s) WHERE %[3]s IS NOT NULL",
		t.Layout.Columns[outbox.ProcessedAt], t.SQL(), t.Column(outbox.ProcessedAt))
}
