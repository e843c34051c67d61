package table_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestRowsThatShareAnID, as in two partitions of a table: what is done to one of them is not done to the
// other, which nobody may have stored yet.
func TestRowsThatShareAnID(t *testing.T) {
	for _, mark := range []outbox.Mark{outbox.MarkUpdate, outbox.MarkDelete} {
		t.Run(string(mark), func(t *testing.T) {
			b := newBench(t, testenv.SharedPostgres(t), mark)
			b.exec(`ALTER TABLE outbox_messages RENAME TO old_outbox;
				CREATE TABLE outbox_messages (LIKE old_outbox INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY RANGE (aggregate_id);
				CREATE TABLE outbox_1 PARTITION OF outbox_messages FOR VALUES FROM (1) TO (2);
				CREATE TABLE outbox_2 PARTITION OF outbox_messages FOR VALUES FROM (2) TO (3);
				CREATE INDEX ON outbox_messages (id)`)
			b.must(b.db.CheckTable(t.Context(), b.table))
			rows := b.insert(2)
			b.exec(`UPDATE outbox_messages SET id = 1`)
			rows[1].Ref.ID = "1"
			left := `SELECT string_agg(concat(aggregate_id, ' ', processed_at IS NOT NULL, ' ', last_error IS NOT NULL), ', ' ORDER BY aggregate_id)
				FROM outbox_messages WHERE processed_at IS NULL`
			retry := table.Retry{Backoff: time.Second, MaxAttempts: 5}

			rows[0].Failure = "no"
			v, err := b.db.Park(t.Context(), b.table, rows[:1], retry)
			b.must(err)
			b.want(v, table.Done)
			if got := b.text(left); got != "1 f t, 2 f f" {
				t.Fatalf("after one is parked: %s", got)
			}

			tx, err := b.connect().Begin(t.Context())
			b.must(err)
			_, err = tx.Exec(t.Context(), `SELECT FROM outbox_messages WHERE aggregate_id = 2 FOR UPDATE`)
			b.must(err)
			b.want(b.mark(rows), table.Done, table.Locked)
			if got := b.text(left); got != "2 f f" {
				t.Fatalf("after one is marked: %s", got)
			}
			b.must(tx.Rollback(t.Context()))
			b.want(b.mark(rows), table.Done, table.Done)
			if got := b.text(fmt.Sprintf(`coalesce((%s), '')`, left)); got != "" {
				t.Fatalf("after both are marked: %s", got)
			}
		})
	}
}
