package verify

import (
	"context"
	"slices"

	"github.com/walpost/walpost/internal/table"
)

// repair makes rows pending again. Archived ones come first: they are older than
// those of their aggregates that are not, which are not to pass them.
func (v *comparison) repair(ctx context.Context, t *comparedTable, archived, marked []table.MarkedRow) error {
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
	for part := range slices.Chunk(marked, batch) {
		pending, locked, err := v.db.Unmark(ctx, t.Table, part)
		v.report.Repaired += int64(len(pending))
		if err != nil {
			return err
		}
		if len(locked) > 0 {
			v.note("rows of %s are locked by another session and were not repaired: run it again", t)
		}
	}
	return nil
}
