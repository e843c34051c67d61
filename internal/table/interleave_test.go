package table_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// held has each statement that inserts into a table wait, after its snapshot was taken, until the returned function is called.
func (b *bench) held(name string) (release func()) {
	b.t.Helper()
	b.exec(`CREATE OR REPLACE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(77); RETURN NEW; END $$;
		CREATE TRIGGER hold BEFORE INSERT ON ` + name + ` FOR EACH ROW EXECUTE FUNCTION hold(); SELECT pg_advisory_lock(77)`)
	return func() { b.exec(`SELECT pg_advisory_unlock(77)`) }
}

// waits waits until so many sessions wait for a lock, or else is true.
func (b *bench) waits(sessions string, or func() bool) {
	b.t.Helper()
	const waiting = `SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()`
	for begun := time.Now(); b.text(waiting) != sessions && !or(); time.Sleep(5 * time.Millisecond) {
		if time.Since(begun) > testenv.Patience {
			b.t.Fatalf("waited in vain for %s sessions that wait", sessions)
		}
	}
}

// TestDeferredAndMarked: a row is deferred on one connection and marked on another, each while the other's statement is between its
// snapshot and its commit. The mark counts, and no deferral is left.
func TestDeferredAndMarked(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		for _, first := range []string{table.JournalEntries, table.JournalDeferred} {
			t.Run(first, func(t *testing.T) {
				b := newBench(t, pg, outbox.MarkJournal)
				other := b.open()
				for _, db := range []*table.DB{b.db, other} {
					b.must(db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
						_, err := conn.Exec(ctx, `SET lock_timeout = 0`)
						return err
					}))
				}
				rows := b.insert(3)
				b.exec(`ALTER TABLE outbox_messages DISABLE TRIGGER outbox_no_update; UPDATE outbox_messages SET available_at = now() + interval '1 hour';
					ALTER TABLE outbox_messages ENABLE ALWAYS TRIGGER outbox_no_update`)
				var a table.Advance
				b.must(other.Advance(t.Context(), b.table, &a)) // sees how far
				mark := func() error { _, err := b.db.Mark(t.Context(), b.table, rows[1:2]); return err }
				deferLater := func() error { return other.Advance(t.Context(), b.table, &a) }
				statements := []func() error{mark, deferLater}
				if first == table.JournalDeferred {
					statements = []func() error{deferLater, mark}
				}
				release := b.held(first)
				done := make(chan error, 2)
				go func() { done <- statements[0]() }()
				b.waits("1", func() bool { return false })
				go func() { done <- statements[1]() }()
				b.waits("2", func() bool { return len(done) > 0 })
				release()
				b.must(<-done)
				b.must(<-done)
				b.is("deferrals", b.text(`SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_deferred`), "1 3")
				b.is("entries", b.text(`SELECT string_agg(ids::text, ' ') FROM outbox_journal WHERE kind = 'stored'`), "{[2,3)}")
			})
		}
	})
}
