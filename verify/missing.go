package verify

import (
	"context"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// clocks is how far the servers' clocks may be apart, and how long a row may have
// come to the archive before that can be seen.
const clocks = time.Minute

// rows looks in the stream for every row that is marked as stored.
func (v *comparison) rows(ctx context.Context, t *comparedTable, started time.Time) error {
	if !table.MarkOf(t.Table).Stays() {
		v.note("%s: with mark %s stored rows are gone: nothing tells which messages should be there",
			t, t.Mark)
		return nil
	}
	if !v.cfg.Repair {
		// The outbox first: rows move to the archive and not back.
		if err := v.walk(ctx, t, v.db.MarkedSince, started, time.Time{}); err != nil {
			return err
		}
		return v.walk(ctx, t, v.db.ArchivedSince, started, time.Time{})
	}
	// An archived row has to be pending before later ones of its aggregate are.
	begun, err := v.db.Now(ctx)
	if err != nil {
		return err
	}
	if err := v.walk(ctx, t, v.db.ArchivedSince, started, time.Time{}); err != nil {
		return err
	}
	if err := v.walk(ctx, t, v.db.MarkedSince, started, time.Time{}); err != nil {
		return err
	}
	return v.walk(ctx, t, v.db.ArchivedSince, started, begun.Add(-clocks)) // what has moved meanwhile
}

type markedRows func(
	ctx context.Context, t *outbox.Table, since time.Time, next *table.MarkCursor, limit int,
) ([]table.MarkedRow, error)

// walk looks for the rows of one place, where moved is set for those only that came
// to the archive since.
func (v *comparison) walk(
	ctx context.Context, t *comparedTable, list markedRows, started, moved time.Time,
) error {
	var suspects []table.MarkedRow
	var cursor table.MarkCursor
	listed := newIDs() // a row may have been marked twice
	for {
		rows, err := list(ctx, t.Table, v.since, &cursor, batch)
		if err != nil {
			return err
		}
		for _, row := range rows {
			if !moved.IsZero() && row.Archived.Before(moved) || !listed.add(row.ID) {
				continue
			}
			v.report.Rows++
			if !t.seen.has(row.ID) {
				suspects = append(suspects, row)
			}
		}
		last := len(rows) < batch || cursor.At().After(started)
		if last || len(suspects) >= suspectRows {
			if err := v.judgeMissing(ctx, t, suspects); err != nil {
				return err
			}
			suspects = nil
		}
		if last {
			return nil
		}
	}
}

// judgeMissing looks again for rows that were not in the stream. They were marked
// when they were listed, so a message of theirs is in the stream by now.
func (v *comparison) judgeMissing(ctx context.Context, t *comparedTable, suspects []table.MarkedRow) error {
	if len(suspects) == 0 {
		return nil
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	suspects = v.unseen(t, suspects)
	// A row may have been marked long after it was stored.
	for span := uint64(jetstream.U); len(suspects) > 0 && v.first > v.oldest; span *= 2 {
		from := max(v.oldest, v.first-min(span, v.first))
		if err := v.lookBack(ctx, from); err != nil {
			return err
		}
		suspects = v.unseen(t, suspects)
	}
	suspects, err := v.kept(ctx, suspects)
	if err == nil {
		suspects, err = v.db.Here(ctx, t.deliveries, suspects)
	}
	if err != nil {
		return err
	}
	refs := make([]outbox.Ref, len(suspects))
	for i, row := range suspects {
		refs[i] = row.Ref
	}
	found, err := v.db.Find(ctx, t.Table, refs)
	if err != nil {
		return err
	}
	var archived, marked []table.MarkedRow
	for i, f := range found {
		switch f.Place {
		case table.Archived:
			archived = append(archived, suspects[i])
		case table.Marked:
			marked = append(marked, suspects[i])
		}
		// It has moved on otherwise.
	}
	if len(archived)+len(marked) == 0 {
		return nil
	}
	// A relay that heals, or another repair, may have had them delivered since.
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	archived, marked = v.unseen(t, archived), v.unseen(t, marked)
	for _, row := range slices.Concat(archived, marked) {
		v.report.add(Missing, Case{Row: row.String(), Detail: "marked as stored"})
	}
	if !v.cfg.Repair {
		return nil
	}
	return v.repair(ctx, t, archived, marked)
}

// unseen drops the rows that the stream has. Messages without a row are among them:
// the row was not visible when its message was read, and is by now.
func (v *comparison) unseen(t *comparedTable, rows []table.MarkedRow) []table.MarkedRow {
	if len(rows) == 0 {
		return nil
	}
	strangers := map[outbox.Ref]struct{}{}
	for _, m := range v.strangers {
		if v.tables[m.ID.Table] == t {
			strangers[outbox.Ref{Table: t.Table, ID: m.ID.ID, Hash: m.ID.Hash}] = struct{}{}
		}
	}
	return slices.DeleteFunc(rows, func(row table.MarkedRow) bool {
		if _, ok := strangers[row.Ref]; ok {
			t.seen.add(row.ID)
		}
		return t.seen.has(row.ID)
	})
}

// lookBack reads messages from before the window, only to know that they are there.
func (v *comparison) lookBack(ctx context.Context, from uint64) error {
	err := v.cfg.Stream.ScanForward(ctx, from, v.first-1, jetstream.ScanOptions{
		Source: v.cfg.Source,
		Step: func(messages []jetstream.Message) (bool, error) {
			return true, v.each(ctx, messages, func(t *comparedTable, m jetstream.Message, f table.Finding) {
				switch {
				case m.ID.Replay:
				case f.Place == table.Nowhere && table.MarkOf(t.Table).Stays():
					v.stranger(m)
				default:
					t.seen.add(m.ID.ID)
				}
			})
		},
	})
	v.first = from
	return err
}
