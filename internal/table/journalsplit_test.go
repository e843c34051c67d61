package table

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestIndexOfEntriesSplits: while rows are read, another session's marks split the one page that the index of the entries has. Some
// entries had been changed, as those of rows that the stream had lost. No entry gets lost for the index: PostgreSQL would take
// entries of the new pages for dead if one statement searched the index row by row, see entriesOfSQL.
func TestIndexOfEntriesSplits(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		splitting(t, pg, func(db *DB, table *outbox.Table, ids []string) error {
			by := *table
			by.Where, by.Filter = `public.pause(id)`, `public.pause(`+outbox.RowAlias+`.id)`
			f, err := db.Fetch(t.Context(), &by, ids, 1<<20)
			if err == nil && len(f.Rows) != 1 {
				err = fmt.Errorf("%d rows are pending, want one", len(f.Rows))
			}
			return err
		}, func(db *DB, table *outbox.Table, ids []string) {
			f, err := db.Fetch(t.Context(), table, ids, 1<<20)
			must(t, err)
			if len(f.Rows) != 1 {
				t.Errorf("%d rows are pending, want one", len(f.Rows))
			}
			must(t, db.CheckEntries(t.Context(), table))
		})
	})
}

// TestCheckEntries: a statement of somebody else's searches the index row by row.
func TestCheckEntries(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		splitting(t, pg, func(db *DB, _ *outbox.Table, ids []string) error {
			return db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `SET enable_seqscan = off; SET enable_bitmapscan = off`)
				if err == nil {
					_, err = conn.Exec(ctx, `SELECT (SELECT max(j.processed_at) FROM public.outbox_journal j WHERE range_merge(j.ids) @> w.id AND j.ids @> w.id)
						FROM (SELECT unnest($1::text[])::bigint AS id OFFSET 0) w WHERE public.pause(w.id)`, ids)
				}
				return err
			})
		}, func(db *DB, table *outbox.Table, ids []string) {
			err := db.CheckEntries(t.Context(), table)
			if err == nil || !strings.Contains(err.Error(), "lacks ") {
				t.Errorf("%v, want that entries are lacking", err)
			}
			_, err = db.Conn().Exec(t.Context(), `REINDEX TABLE CONCURRENTLY public.outbox_journal`)
			must(t, err)
			must(t, db.CheckEntries(t.Context(), table))
		})
	})
}

// splitting has read look for rows, one of which is pending, and its statement wait at that one for the function pause.
func splitting(
	t *testing.T, pg *testenv.Postgres, read func(*DB, *outbox.Table, []string) error, then func(*DB, *outbox.Table, []string),
) {
	db, table, exec := withJournal(t, pg)
	other, err := pgx.Connect(t.Context(), db.Conn().Config().ConnString())
	must(t, err)
	defer other.Close(t.Context())
	entries := func(from, to, step int) string {
		return fmt.Sprintf(`INSERT INTO public.outbox_journal (outbox, kind, ids) SELECT 'public.outbox_events', 'stored',
			int8multirange(int8range(k * 100, k * 100 + 100)) FROM generate_series(%d, %d, %d) k`, from, to, step)
	}
	for _, sql := range []string{
		`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload)
			SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 6100) g`,
		`ALTER TABLE public.outbox_journal SET (autovacuum_enabled = off)`,
		entries(300, 329, 1), entries(0, 60, 1),
		`UPDATE public.outbox_journal SET ids = '{}' WHERE ids << '{[4000,4001)}'`,
		entries(38, 0, -1), // row 3950 is pending
		`CREATE FUNCTION public.pause(id bigint) RETURNS boolean LANGUAGE plpgsql STABLE AS $$ BEGIN
			IF id = 3950 THEN PERFORM pg_advisory_xact_lock_shared(77); END IF; RETURN true; END $$`,
	} {
		exec(sql)
	}
	var ids []string
	for k := range 60 {
		ids = append(ids, fmt.Sprint(k*100+50))
	}
	_, err = other.Exec(t.Context(), `SELECT pg_advisory_lock(77)`)
	must(t, err)
	done := make(chan error, 1)
	go func() { done <- read(db, table, ids) }()
	for begun := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		var waits bool
		must(t, other.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = 77 AND NOT granted)`).Scan(&waits))
		if waits {
			break
		}
		if time.Since(begun) > testenv.Patience || len(done) > 0 {
			t.Fatal("the statement does not wait")
		}
	}
	for _, sql := range []string{entries(299, 61, -1), entries(400, 330, -1), `SELECT pg_advisory_unlock(77)`} {
		_, err = other.Exec(t.Context(), sql)
		must(t, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
	var pages int
	must(t, other.QueryRow(t.Context(), `SELECT pg_relation_size('public.outbox_journal_ids_idx') / 8192`).Scan(&pages))
	if pages < 3 {
		t.Fatalf("the index has %d pages: it was not split", pages)
	}
	then(db, table, ids)
}
