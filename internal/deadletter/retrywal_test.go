package deadletter_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// addDeadLetter makes a dead letter of a row that only the WAL has.
func (b *bench) addDeadLetter(id, aggregate string) {
	b.t.Helper()
	ev := &outbox.Event{Table: b.table}
	for f, v := range map[outbox.Field]string{
		outbox.ID: id, outbox.EventType: "x", outbox.Payload: `{"n": 0.10}`, outbox.AggregateType: "order", outbox.AggregateID: aggregate,
		outbox.TenantID: "0", outbox.EventVersion: "1", outbox.OccurredAt: "2024-01-01 00:00:00+00",
	} {
		ev.Values[f] = []byte(v)
	}
	b.must(b.db.AddDeadLetter(b.t.Context(), ev, "subject: bad"))
}

// TestRetryOfWhatOnlyTheWALHolds: the row is inserted and deleted in the
// transaction that deletes the dead letter, and never without a slot to carry it.
func TestRetryOfWhatOnlyTheWALHolds(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkNone)
		b.addDeadLetter("7", "1")
		refused := func(want string) {
			t.Helper()
			done, left := b.retry(b.dlq(b.table), deadletter.Filter{})
			if len(done) != 0 || left[1] == nil || !strings.Contains(left[1].Error(), want) || hint.Of(left[1]) == "" {
				t.Errorf("retried %v, left %v, want %q", done, left, want)
			}
		}
		refused("publication")
		b.exec(`CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert')`)
		refused("slot")
		b.exec(`SELECT pg_create_logical_replication_slot('walpost', 'test_decoding')`)
		defer b.exec(`SELECT pg_drop_replication_slot('walpost')`)
		if done, left := b.retry(b.dlq(b.table), deadletter.Filter{}); len(done) != 1 {
			t.Fatalf("retried %v, left %v", done, left)
		}
		if n := b.text(`SELECT count(*) FROM outbox_messages`); n != "0" {
			t.Errorf("%s rows stay in the outbox", n)
		}
		wal := b.text(`SELECT string_agg(data, E'\n') FROM pg_logical_slot_get_changes('walpost', NULL, NULL)`)
		var done []string
		for line := range strings.Lines(wal) {
			done = append(done, strings.Join(strings.Fields(line)[:min(3, len(strings.Fields(line)))], " "))
		}
		slices.Sort(done[1 : len(done)-1])
		if len(done) != 5 || !strings.HasPrefix(done[0], "BEGIN") || done[1] != "table public.outbox_messages: DELETE:" ||
			done[2] != "table public.outbox_messages: INSERT:" || done[3] != "table public.outbox_messages_dlq: DELETE:" {
			t.Errorf("the WAL holds\n%s\nwant one transaction with all of it", wal)
		}
	})
}
