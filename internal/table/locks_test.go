package table_test

import (
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestLockedDeferral: a row whose deferral another session has locked keeps no other row from being marked or recorded.
func TestLockedDeferral(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkJournal)
		rows := b.insert(4)
		for i := range rows {
			rows[i].Failure = "subject: bad"
		}
		retry := table.Retry{Backoff: time.Hour, MaxAttempts: 10}
		park := func(rows []table.Row) []table.Verdict {
			t.Helper()
			v, err := b.db.Park(t.Context(), b.table, rows, retry)
			b.must(err)
			return v
		}
		b.want(park(rows[:3]), table.Done, table.Done, table.Done)
		tx, err := b.app.Begin(t.Context())
		b.must(err)
		_, err = tx.Exec(t.Context(), `SELECT FROM outbox_deferred WHERE id = 2 FOR UPDATE`)
		b.must(err)
		const records = `SELECT string_agg(concat(id, ':', attempts), ' ' ORDER BY id) FROM outbox_deferred`
		for i := range rows[:3] {
			rows[i].Polled, rows[i].Attempts, rows[i].Line = true, 1, i
		}
		rows[3].Line = 3
		b.want(park(rows), table.Done, table.Locked, table.Done, table.Done)
		b.is("records", b.text(records), "1:2 2:1 3:2 4:1")
		for i := range rows { // the next failure is the last one
			rows[i].Attempts, retry.MaxAttempts = 2, 2
		}
		rows[1].Attempts = 1
		b.want(park(rows[1:3]), table.Locked, table.Done)
		b.is("dead letters", b.text(`SELECT string_agg(row_id, ' ') FROM outbox_messages_dlq`), "3")
		b.want(b.mark(rows[:2]), table.Done, table.Locked)
		b.is("entries", b.text(`SELECT string_agg(concat(kind, ids), ' ' ORDER BY ids) FROM outbox_journal`), "stored{[1,2)} dead{[3,4)}")
		b.is("records", b.text(records), "2:1 4:1")
		if who, err := b.db.Blocker(t.Context(), b.table, "2"); err != nil || who == "" || who == table.Unlocked {
			t.Errorf("the blocker of row 2 is %q: %v", who, err)
		}
		b.must(tx.Commit(t.Context()))
		b.want(b.mark(rows[1:2]), table.Done)
		b.is("records", b.text(records), "4:1")
	})
}
