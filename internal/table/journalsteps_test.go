package table_test

import (
	"testing"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestJournalSteps: the progress comes to the last row in steps, also where many rows lie between holes, and to none behind a row that
// is pending.
func TestJournalSteps(t *testing.T) {
	defer func(holes, searched int) { *table.MostHoles, *table.MostSearched = holes, searched }(*table.MostHoles, *table.MostSearched)
	*table.MostHoles, *table.MostSearched = 10, 10
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkJournal)
	b.table.Where, b.table.Filter = `event_type = 'order.late'`, outbox.RowAlias+`.event_type = 'order.late'`
	b.exec(`UPDATE outbox_known SET condition = $$event_type = 'order.late'$$`)
	b.insert(30)
	writer := b.connect()
	run := func(sql string) {
		t.Helper()
		_, err := writer.Exec(t.Context(), sql)
		b.must(err)
	}
	run(`BEGIN`)
	run(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.late', '{}')`)
	b.insert(70)
	b.exec(`DELETE FROM outbox_messages WHERE id < 27 AND id % 2 = 1`)
	var a table.Advance
	b.must(b.db.Advance(t.Context(), b.table, &a)) // sees how far
	const settled = `SELECT ` + testenv.Settled + ` FROM outbox_known`
	for i, rows := range []int64{87, 0, 0} {
		b.must(b.db.Advance(t.Context(), b.table, &a))
		b.is("settled", b.text(settled), "101")
		if a.Whole == nil && rows > 0 || a.Whole != nil && a.Whole.Rows != rows {
			t.Errorf("call %d: a whole search %+v, want of %d rows", i, a.Whole, rows)
		}
	}
	run(`COMMIT`)
	b.is("pending", b.fresh(), "31")

	b.exec(`UPDATE outbox_known SET unsettled = '{[-9223372036854775808,)}'`)
	for range 3 {
		b.must(b.db.Advance(t.Context(), b.table, &a))
		b.is("before the pending row", b.text(`SELECT `+testenv.Settled+` BETWEEN 20 AND 30 FROM outbox_known`), "true")
		if a.Whole != nil {
			t.Error("the search of the whole table has ended")
		}
	}
	b.mark([]table.Row{b.row("31")})
	for range 2 {
		b.must(b.db.Advance(t.Context(), b.table, &a))
	}
	b.is("in the end", b.text(settled), "101")
}
