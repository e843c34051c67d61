package table_test

import (
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestBacklog: rows that were pending are left until they are marked, although they are updated meanwhile. Those that come later are not
// asked for, however many ids the backlog can have.
func TestBacklog(t *testing.T) {
	defer func(n int) { *table.BacklogList = n }(*table.BacklogList)
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete, outbox.MarkJournal} {
		b := newBench(t, testenv.SharedPostgres(t), mark)
		left := func(of *table.Backlog, want string) {
			t.Helper()
			got, err := of.Left(t.Context(), b.db)
			b.must(err)
			if got != want {
				t.Errorf("%s: %q is left, want %q", mark, got, want)
			}
		}
		rows := b.insert(10)
		update := `UPDATE outbox_messages SET event_type = event_type WHERE id > 1`
		if mark == outbox.MarkJournal {
			update = `SELECT` // the table refuses it
		}
		*table.BacklogList = 4
		short := &table.Backlog{Table: b.table, Threshold: time.Second}
		left(short, "row 1")
		*table.BacklogList = 10
		whole := &table.Backlog{Table: b.table, Threshold: time.Second}
		left(whole, "row 1")
		b.exec(update)
		rows = append(rows, b.insert(10)...)
		b.mark(rows[:1])
		left(whole, "row 2")
		*table.BacklogList = 4
		for _, next := range []struct {
			marked int
			left   string
		}{{4, "row 5"}, {5, "row 6"}, {8, "row 9"}} {
			b.mark(rows[:next.marked])
			left(short, next.left)
			left(whole, next.left)
			b.exec(update)
		}
		b.mark(rows[:10])
		left(whole, "")
		left(short, "row 11") // its last list had two others, too
		b.mark(rows[:12])
		left(short, "")
	}
}
