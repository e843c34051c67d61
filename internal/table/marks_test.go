package table_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// delivered inserts rows that occurred and were processed as long ago as that.
func (b *bench) delivered(n int, occurred, processed string) {
	b.t.Helper()
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
		SELECT 'order', i, 'order.created', '{"n": 1.10}', now() - $2::interval, now() - $3::interval FROM generate_series(1, $1) i`,
		n, occurred, processed)
}

// retain makes a pass of retention: a row that was processed an hour ago is old.
func (b *bench) retain() *retention.Report {
	b.t.Helper()
	r, err := retention.Run(b.t.Context(), b.config(), retention.Options{
		Tables: []*outbox.Table{b.table}, ArchiveAfter: time.Hour,
	})
	b.must(err)
	return r
}

// TestHasMarks also where every marked row has gone to the archive.
func TestHasMarks(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	role := "reader_" + b.text(`SELECT current_database()`)
	b.exec(`CREATE ROLE ` + role + ` LOGIN; GRANT SELECT ON outbox_messages TO ` + role)
	t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	cfg := b.config()
	cfg.URL = strings.Replace(cfg.URL, "postgres@", role+"@", 1)
	poor, err := table.Open(t.Context(), cfg)
	b.must(err)
	t.Cleanup(poor.Close)
	b.exec(`CREATE TABLE other (LIKE outbox_messages INCLUDING ALL)`)
	other := *b.table
	other.Name, other.Known = "other", ""

	want := func(when string, db *table.DB, box *outbox.Table, want bool) {
		t.Helper()
		if has, err := db.HasMarks(t.Context(), box); err != nil || has != want {
			t.Errorf("%s: %s has marks: %v, %v, want %v", when, box, has, err, want)
		}
	}
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'b.c', '{}')`)
	want("pending", b.db, b.table, false)
	want("pending", poor, b.table, false)
	b.delivered(1, "2 hours", "2 hours")
	want("marked", b.db, b.table, true)
	want("marked", poor, b.table, true)
	if r := b.retain(); r.Tables[0].Archived != 1 {
		t.Fatalf("report %+v", r)
	}
	want("archived", b.db, b.table, true)
	want("archived", b.db, &other, false)
	want("archived, and not to be read", poor, b.table, true)
	b.exec(`DROP TABLE outbox_messages_archive`)
	want("no archive", b.db, b.table, false)
	want("no archive", poor, b.table, false)
}

// TestWhatTheConnectionDiedOf is said by every statement, whichever comes first.
func TestWhatTheConnectionDiedOf(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	_, err := b.db.HasMarks(t.Context(), b.table)
	b.must(err)
	b.exec(`SELECT pg_terminate_backend($1::int)`, b.db.Conn().PgConn().PID())
	for range 3 {
		_, err := b.db.HasMarks(t.Context(), b.table)
		if pg.Code(err) != "57P01" {
			t.Errorf("a statement fails with %v", err)
		}
		if err := b.db.Ping(t.Context()); pg.Code(err) != "57P01" {
			t.Errorf("ping fails with %v", err)
		}
	}
	if b.db.Alive() {
		t.Error("the connection is said to live")
	}
}
