package table

import (
	"fmt"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

// TestDetached: a detached partition counts, and so does what may be one. A stranger's table is none.
func TestDetached(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		db, table, exec := withJournal(t, pg)
		var name string
		must(t, db.Conn().QueryRow(t.Context(), `SELECT current_database()`).Scan(&name))
		owner, stranger := name+"_owner", name+"_stranger"
		exec(`CREATE ROLE ` + owner + `; CREATE ROLE ` + stranger)
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
