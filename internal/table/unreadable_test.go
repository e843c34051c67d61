package table_test

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestRowThatCannotBeRead: what the server cannot render in a row is no reason to take the row
// for one that is gone, and keeps no other row from being looked up, marked and fetched. Dead, it
// stays where it is, and its dead letter has its id.
func TestRowThatCannotBeRead(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(5)
	b.exec(`CREATE CAST (bigint AS timestamptz) WITHOUT FUNCTION`)
	b.exec(`ALTER TABLE outbox_messages ALTER trace_id TYPE timestamptz USING NULL`)
	b.exec(`UPDATE outbox_messages SET trace_id = (-9000000000000000000)::bigint::timestamptz WHERE id = 3`)

	states, err := b.db.LookUp(t.Context(), b.table, rows)
	b.must(err)
	for i, s := range states {
		if good := i != 2; !s.Exists || s.Same != good || s.Publish() != good {
			t.Errorf("row %d: %+v, want it to exist, and to be what it was: %t", i+1, s, good)
		}
	}
	whole := make([]bool, len(rows))
	b.must(b.db.Whole(t.Context(), b.table, rows, 1<<20, func(n int, ev *outbox.Event) {
		whole[n] = ev.Ref() == rows[n].Ref
	}))
	if !slices.Equal(whole, []bool{true, true, false, true, true}) {
		t.Errorf("read are %v, want all but row 3", whole)
	}
	fetched, err := b.db.Fetch(t.Context(), b.table, []string{"1", "2", "3", "4", "5"}, 1<<20)
	b.must(err)
	if fetched.N != 5 || len(fetched.Rows) != 4 || len(fetched.Unreadable) != 1 || pg.Code(fetched.Unreadable["3"]) != "22008" {
		t.Errorf("of %d rows %d were fetched, unreadable are %v, want row 3 alone", fetched.N, len(fetched.Rows), fetched.Unreadable)
	}
	verdicts, err := b.db.Mark(t.Context(), b.table, rows)
	b.must(err)
	b.want(verdicts, table.Done, table.Done, table.Done, table.Done, table.Done)
	if got := b.text(`SELECT string_agg(id::text, ' ') FROM outbox_messages WHERE processed_at IS NULL`); got != "3" {
		t.Errorf("not marked are %s, want 3", got)
	}
	marked := func(limit int, want string) {
		t.Helper()
		var got []string
		for next := (&table.MarkCursor{}); ; {
			page, err := b.db.MarkedSince(t.Context(), b.table, time.Time{}, next, limit)
			b.must(err)
			for _, row := range page {
				got = append(got, row.ID)
			}
			if len(page) < limit {
				break
			}
		}
		if got := strings.Join(got, " "); got != want {
			t.Errorf("rows %s are listed as marked, want %s", got, want)
		}
	}
	b.exec(`UPDATE outbox_messages SET processed_at = now() - (6 - id) * interval '1 minute'`)
	marked(2, "1 2 4 5")
	marked(100, "1 2 4 5")
	b.exec(`UPDATE outbox_messages SET trace_id = (SELECT trace_id FROM outbox_messages WHERE id = 3) WHERE id IN (1, 2, 5)`)
	marked(100, "4")
	b.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE id = 3`)
	for range 2 { // the second time there is nothing to do
		verdicts, err = b.db.Park(t.Context(), b.table, []table.Row{{
			Ref: outbox.Ref{Table: b.table, ID: "3", Hash: outbox.UnknownHash}, Failure: "unreadable: x", Polled: true,
		}}, table.Retry{})
		b.must(err)
		b.want(verdicts, table.Done)
	}
	got := b.text(`SELECT string_agg(concat_ws('|', row_id, original ->> 'id', original -> 'walpost:omitted' ->> 0, last_error), ', ') FROM outbox_messages_dlq`)
	if want := "3|3|tenant_id|unreadable: x; the row cannot be moved, and is still in its outbox"; got != want {
		t.Errorf("the dead letters are %s, want %s", got, want)
	}
}
