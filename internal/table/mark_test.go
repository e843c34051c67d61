package table_test

import (
	"slices"
	"testing"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// TestMarks: what each mark says of its rows.
func TestMarks(t *testing.T) {
	for mark, want := range map[outbox.Mark]struct {
		stays, deletes bool
		writes         []outbox.Field
	}{
		outbox.MarkUpdate:  {true, true, []outbox.Field{outbox.ProcessedAt, outbox.Attempts, outbox.LastError, outbox.AvailableAt}},
		outbox.MarkDelete:  {false, true, []outbox.Field{outbox.Attempts, outbox.LastError, outbox.AvailableAt}},
		outbox.MarkJournal: {true, false, nil},
	} {
		box := &outbox.Table{Schema: "public", Name: "box", Layout: outbox.Canonical(), Mark: mark}
		m := table.MarkOf(box)
		if m.Stays() != want.stays || table.Deletes(box) != want.deletes || !slices.Equal(table.Writes(box), want.writes) {
			t.Errorf("%s: stays %t, deletes %t, writes %v", mark, m.Stays(), table.Deletes(box), table.Writes(box))
		}
	}
}
