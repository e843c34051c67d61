package verify

import (
	"context"
	"fmt"
	"math"
	"strconv"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
)

// lookAgain is how long a relay may take to notice what an outbox is now, such as the partitions that it has.
const lookAgain = 5 * time.Second

// overlooked looks for pending rows that the relay's searches pass over.
func (v *comparison) overlooked(ctx context.Context, t *comparedTable) error {
	if err := v.db.CheckEntries(ctx, t.Table); err != nil {
		return err
	}
	first, err := v.listOverlooked(ctx, t)
	if err != nil || len(first) == 0 {
		return err
	}
	if !sleep.For(ctx, lookAgain) {
		return ctx.Err()
	}
	again, err := v.listOverlooked(ctx, t)
	if err != nil {
		return err
	}
	var ids []int64
	for id := range again {
		if first[id] {
			ids = append(ids, id)
		}
	}
	// A message of theirs may be from before the window.
	for span := uint64(jetstream.U); len(ids) > 0 && v.first > v.oldest; span *= 2 {
		if err := v.lookBack(ctx, max(v.oldest, v.first-min(span, v.first))); err != nil {
			return err
		}
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	var missing []int64
	for _, id := range ids {
		if v.isStored(t, strconv.FormatInt(id, 10)) {
			v.note("%s: row %d is stored, and has no mark", t, id)
			continue
		}
		missing = append(missing, id)
		const detail = "pending, and no search of the relay's finds it"
		v.report.add(Missing, Case{Row: fmt.Sprintf("%s/%d", t, id), Detail: detail})
	}
	if !v.cfg.Repair || len(missing) == 0 {
		return nil
	}
	known, err := v.db.SearchAgain(ctx, t.Table, missing)
	if known {
		v.report.Repaired += int64(len(missing))
	}
	return err
}

func (v *comparison) listOverlooked(ctx context.Context, t *comparedTable) (map[int64]bool, error) {
	all := map[int64]bool{}
	for from, more := int64(math.MinInt64), true; more; {
		var ids []int64
		var err error
		ids, from, more, err = v.db.Overlooked(ctx, t.Table, from)
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			all[id] = true
		}
	}
	return all, nil
}

// isStored reports whether the stream has a message of a row, be it one from before the row was seen.
func (v *comparison) isStored(t *comparedTable, id string) bool {
	for _, m := range v.strangers {
		if v.tables[m.ID.Table] == t && m.ID.ID == id {
			return true
		}
	}
	return t.seen.has(id)
}
