package table

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestDetached: a detached partition counts, and so does what may be one. A stranger's table is none.
func TestDetached(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		db, table, exec := withJournal(t, pg)
		var name string
		must(t, db.Conn().QueryRow(t.Context(), `SELECT current_database()`).Scan(&name))
		owner, stranger := name+"_owner", name+"_stranger"
		exec(`CREATE ROLE ` + owner + ` SUPERUSER; CREATE ROLE ` + stranger) // the session trusts the owner
		like := func(name, role, change string) {
			exec(fmt.Sprintf(`CREATE TABLE public.%[1]s (LIKE public.outbox_events%[3]s); ALTER TABLE public.%[1]s OWNER TO %[2]s`, name, role, change))
		}
		exec(`ALTER TABLE public.outbox_events OWNER TO ` + owner)
		like("owners", owner, "")
		like("superusers", "postgres", "")
		like("strangers", stranger, "")
		like("more_columns", owner, ", more int")
		exec(`CREATE TABLE public.lacks_columns (id bigint, event_type text); ALTER TABLE public.lacks_columns OWNER TO ` + owner)
		exec(`ALTER TABLE public.outbox_events ADD COLUMN later int`)
		like("draws_ids", owner, " INCLUDING IDENTITY")
		exec(`DO $$ BEGIN EXECUTE format('ALTER TABLE public.outbox_events DETACH PARTITION %s', (SELECT min(relid::text)
			FROM pg_partition_tree('public.outbox_events') WHERE isleaf)); END $$`)
		names, err := db.Detached(t.Context(), table)
		must(t, err)
		if got, want := strings.Join(names, " "), "public.outbox_events_1000000 public.owners public.superusers"; got != want {
			t.Errorf("%s, want %s", got, want)
		}
	})
}

// TestHalfCut: a constraint that a cut has left on a partition is named, with the statement that takes it away.
func TestHalfCut(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	find := func(want int) []string {
		t.Helper()
		found, err := db.SizeFindings(t.Context(), table)
		must(t, err)
		if len(found) != want {
			t.Fatalf("found %+v, want %d", found, want)
		}
		if want == 0 {
			return nil
		}
		if found[0].Code != "table-half-partitioned" || !strings.Contains(found[0].Text, "CHECK ((id < 3000000))") {
			t.Errorf("found %+v", found)
		}
		return strings.SplitAfter(found[0].Fix, "or: ")
	}
	find(0)
	exec(`ALTER TABLE public.outbox_events_rest ADD CONSTRAINT walpost_bounds CHECK (id < 3000000) NOT VALID`)
	exec(find(1)[1])
	find(0)
}

// TestRowOfADetachedPartition: a row that the WAL brings is not deleted because its partition is detached. One that is nowhere is.
func TestRowOfADetachedPartition(t *testing.T) {
	db, table, exec := withJournal(t, testenv.SharedPostgres(t))
	exec(`INSERT INTO public.outbox_events (aggregate_type, aggregate_id, event_type, payload) SELECT 'order', g, 'order.placed', '{}' FROM generate_series(1, 2) g`)
	var xid int64
	must(t, db.Conn().QueryRow(t.Context(), `SELECT pg_current_xact_id()::xid::text::bigint`).Scan(&xid))
	gone := func(want int) {
		t.Helper()
		rows := []Row{{Ref: outbox.Ref{Table: table, ID: "1", Hash: 1}, XID: uint32(xid)}}
		if got := db.sampleGone(t.Context(), table, rows); len(got) != want {
			t.Errorf("gone are %v, want %d", got, want)
		}
	}
	gone(0)
	exec(`ALTER TABLE public.outbox_events DETACH PARTITION public.outbox_events_1000000`)
	gone(0)
	exec(`ALTER TABLE public.outbox_events ATTACH PARTITION public.outbox_events_1000000 FOR VALUES FROM (MINVALUE) TO (1000001); DELETE FROM public.outbox_events WHERE id = 1`)
	gone(1)
}
