package verify

import (
	"context"
	"slices"
	"time"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// rows looks in the stream for every row that is marked as stored.
func (v *comparison) rows(ctx context.Context, t *table, started time.Time) error {
	if t.Mark != outbox.MarkUpdate {
		v.note("%s: with mark %s stored rows are gone: nothing tells which messages should be there", t, t.Mark)
		return nil
	}
	var suspects []outbox.Ref
	// The outbox first: rows move to the archive and not back.
	for _, walk := range []func(context.Context, *outbox.Table, time.Time, *fallback.MarkCursor, int) ([]outbox.Ref, error){v.db.MarkedSince, v.db.ArchivedSince} {
		var cursor fallback.MarkCursor
		for {
			refs, err := walk(ctx, t.Table, v.since, &cursor, batch)
			if err != nil {
				return err
			}
			v.report.Rows += int64(len(refs))
			for _, ref := range refs {
				if !t.seen.has(ref.ID) {
					suspects = append(suspects, ref)
				}
			}
			if len(suspects) >= suspectRows {
				if err := v.judgeMissing(ctx, t, suspects); err != nil {
					return err
				}
				suspects = suspects[:0]
			}
			if len(refs) < batch || cursor.At().After(started) {
				break
			}
		}
	}
	return v.judgeMissing(ctx, t, suspects)
}

// judgeMissing looks again for rows that were not in the stream. They were marked
// when they were listed, so a message of theirs is in the stream by now.
func (v *comparison) judgeMissing(ctx context.Context, t *table, suspects []outbox.Ref) error {
	if len(suspects) == 0 {
		return nil
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	suspects = v.unseen(t, suspects)
	// A row may have been marked long after it was stored.
	for span := uint64(publish.U); len(suspects) > 0 && v.first > v.oldest; span *= 2 {
		from := max(v.oldest, v.first-min(span, v.first))
		if err := v.lookBack(ctx, from); err != nil {
			return err
		}
		suspects = v.unseen(t, suspects)
	}
	found, err := v.db.Find(ctx, t.Table, suspects)
	if err != nil {
		return err
	}
	var marked, archived []outbox.Ref
	for i, f := range found {
		switch f.Place {
		case fallback.Marked:
			marked = append(marked, suspects[i])
		case fallback.Archived:
			archived = append(archived, suspects[i])
		default:
			continue // it has moved on
		}
		v.report.add(Missing, Case{Row: suspects[i].String(), Detail: "marked as stored"})
	}
	if !v.cfg.Repair {
		return nil
	}
	return v.repair(ctx, t, marked, archived)
}

func (v *comparison) unseen(t *table, refs []outbox.Ref) []outbox.Ref {
	return slices.DeleteFunc(refs, func(ref outbox.Ref) bool { return t.seen.has(ref.ID) })
}

// lookBack reads messages from before the window, only to know that they are there.
func (v *comparison) lookBack(ctx context.Context, from uint64) error {
	err := v.cfg.Stream.ReadOn(ctx, from, v.first-1, publish.ReadBackOptions{
		Source: v.cfg.Source,
		Step: func(messages []publish.Message) (bool, error) {
			return true, v.each(ctx, messages, func(t *table, m publish.Message, f fallback.Finding) {
				if !m.ID.Replay && (f.Place != fallback.Nowhere || t.Mark != outbox.MarkUpdate) {
					t.seen.add(m.ID.ID)
				}
			})
		},
	})
	v.first = from
	return err
}

func (v *comparison) repair(ctx context.Context, t *table, marked, archived []outbox.Ref) error {
	for part := range slices.Chunk(marked, batch) {
		locked, err := v.db.Unmark(ctx, t.Table, part)
		if err != nil {
			return err
		}
		v.report.Repaired += int64(len(part) - len(locked))
		if len(locked) > 0 {
			v.note("rows of %s are locked by another session and were not repaired: run it again", t)
		}
	}
	for part := range slices.Chunk(archived, batch) {
		n, err := v.db.Return(ctx, t.Table, part)
		if err != nil {
			return err
		}
		v.report.Repaired += int64(n)
		if n < len(part) {
			v.note("archived rows of %s have ids that are in the outbox again, and were not repaired", t)
		}
	}
	return nil
}
