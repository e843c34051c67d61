package table_test

import (
	"testing"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestLineIsKeptOverStatements: the rows are so large that each is recorded in a statement of its own, and none
// of a line is while somebody has the first one locked.
func TestLineIsKeptOverStatements(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(6)
	for i := range rows {
		rows[i].Failure, rows[i].Bytes = "subject: none", 1<<30
	}
	rows[4].Line = 1
	tx, err := b.connect().Begin(t.Context())
	b.must(err)
	_, err = tx.Exec(t.Context(), `SELECT FROM outbox_messages WHERE id = 1 FOR UPDATE`)
	b.must(err)
	verdicts, err := b.db.Park(t.Context(), b.table, rows, retry)
	b.must(err)
	b.want(verdicts, table.Locked, table.Locked, table.Locked, table.Locked, table.Done, table.Locked)
	const recorded = `SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_messages WHERE last_error IS NOT NULL`
	if got := b.text(recorded); got != "5" {
		t.Errorf("recorded are %s, want row 5 alone", got)
	}
	b.must(tx.Rollback(t.Context()))
	verdicts, err = b.db.Park(t.Context(), b.table, rows, retry)
	b.must(err)
	b.want(verdicts, table.Done, table.Done, table.Done, table.Done, table.Done, table.Done)
	if got := b.text(recorded); got != "1 2 3 4 5 6" {
		t.Errorf("recorded are %s, want all", got)
	}
}
