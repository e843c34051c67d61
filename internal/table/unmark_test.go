package table_test

import (
	"strings"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// listed are the rows that a walk lists, from wherever they are.
func (b *bench) listed(archived bool) []table.MarkedRow {
	b.t.Helper()
	var next table.MarkCursor
	list := b.db.MarkedSince
	if archived {
		list = b.db.ArchivedSince
	}
	rows, err := list(b.t.Context(), b.table, time.Time{}, &next, 100)
	b.must(err)
	return rows
}

// archiveAll moves the rows as retention does.
func (b *bench) archiveAll() {
	b.t.Helper()
	b.exec(`UPDATE outbox_messages SET processed_at = processed_at - interval '2 days'`)
	_, err := retention.Run(b.t.Context(), b.config(), retention.Options{Tables: []*outbox.Table{b.table}, ArchiveAfter: 24 * time.Hour})
	b.must(err)
	if n := b.text(`SELECT count(*) FROM outbox_messages`); n != "0" {
		b.t.Fatalf("%s rows are not archived", n)
	}
}

// TestUnmarkLeavesAnotherMarkAlone: a row that was delivered and marked again since it
// was listed is not lost any more.
func TestUnmarkLeavesAnotherMarkAlone(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		b.mark(b.insert(5))
		rows := b.listed(false)
		b.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE id IN (2, 3)`)
		b.exec(`UPDATE outbox_messages SET processed_at = clock_timestamp() WHERE id = 3`)
		holder := b.connect()
		for _, sql := range []string{`BEGIN`, `SELECT FROM outbox_messages WHERE id IN (3, 4) FOR UPDATE`} {
			_, err := holder.Exec(t.Context(), sql)
			b.must(err)
		}
		pending, locked, err := b.db.Unmark(t.Context(), b.table, rows)
		b.must(err)
		if n := len(pending); n != 2 || len(locked) != 1 || locked[0].ID != "4" {
			t.Errorf("%d rows were unmarked, and %v are locked, want 2 and row 4", n, locked)
		}
		if got := b.text(`SELECT string_agg(id::text, ' ' ORDER BY id) FROM outbox_messages WHERE processed_at IS NULL`); got != "1 2 5" {
			t.Errorf("rows %s are pending, want 1 2 5", got)
		}
	})
}

// TestCancelledAfterItsLastRow: what a statement has returned does not count if it ends too late. It is
// done again in portions.
func TestCancelledAfterItsLastRow(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE SEQUENCE commits;
		CREATE FUNCTION late() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF nextval('commits') IN (1, 100) THEN RAISE 'too late' USING ERRCODE = 'query_canceled'; END IF;
			RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER late AFTER UPDATE ON outbox_messages DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW EXECUTE FUNCTION late()`)
	rows := b.insert(20)
	holder := b.connect()
	lock := func() {
		for _, sql := range []string{`BEGIN`, `SELECT FROM outbox_messages WHERE id = 4 FOR UPDATE`} {
			_, err := holder.Exec(t.Context(), sql)
			b.must(err)
		}
	}
	lock()
	locked := 0
	for _, v := range b.mark(rows) {
		if v == table.Locked {
			locked++
		}
	}
	if locked != 1 {
		t.Errorf("%d verdicts say locked, want 1", locked)
	}
	_, err := holder.Exec(t.Context(), `ROLLBACK`)
	b.must(err)
	b.mark(rows[3:4])
	lost := b.listed(false)
	b.exec(`SELECT setval('commits', 99)`)
	lock()
	pending, left, err := b.db.Unmark(t.Context(), b.table, lost)
	b.must(err)
	if n := len(pending); n != 19 || len(left) != 1 || left[0].ID != "4" {
		t.Errorf("%d rows were unmarked, and %v are locked, want 19 and row 4", n, left)
	}
}

// TestReturnTakesWhatIsThere: the outbox may have columns that the archive got later,
// or never, and such that it generates.
func TestReturnTakesWhatIsThere(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		b.exec(`ALTER TABLE outbox_messages ADD twice BIGINT GENERATED ALWAYS AS (aggregate_id * 2) STORED`)
		b.exec(`ALTER TABLE outbox_messages_archive ADD twice BIGINT`)
		b.mark(b.insert(3))
		b.archiveAll()
		b.exec(`ALTER TABLE outbox_messages ADD region TEXT NOT NULL DEFAULT 'eu'`)
		rows := b.listed(true)
		b.exec(`UPDATE outbox_messages_archive SET processed_at = now() WHERE id = 2`)
		n, err := b.db.Return(t.Context(), b.table, rows)
		b.must(err)
		if n != 2 || len(rows) != 3 || rows[0].Archived.IsZero() {
			t.Errorf("%d rows were returned of %+v, want 2 of 3", n, rows)
		}
		got := b.text(`SELECT string_agg(concat_ws(' ', id, region, twice, processed_at, last_error), ', ' ORDER BY id) FROM outbox_messages`)
		if !strings.HasPrefix(got, "1 eu 2 held: ") || !strings.Contains(got, ", 3 eu 6 held: ") || strings.Count(got, ",") != 1 {
			t.Errorf("the rows are %q", got)
		}
	})
}
