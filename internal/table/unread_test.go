package table_test

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// unread are the tables that UnreadFindings names on a connection.
func (b *bench) unread(db *table.DB) string {
	b.t.Helper()
	found, err := db.UnreadFindings(b.t.Context(), []*outbox.Table{b.table})
	b.must(err)
	var names []string
	for _, f := range found {
		names = append(names, strings.Fields(f.Text)[1])
	}
	return strings.Join(names, " ")
}

// TestUnread: an outbox that migrate made is named while it has rows that no relay delivers, and in no other case.
func TestUnread(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		events := &outbox.Table{Schema: "public", Name: "outbox_events", Layout: outbox.Append(), Mark: outbox.MarkJournal}
		cfg, err := pgx.ParseConfig(b.url)
		b.must(err)
		m := migrations.New(cfg, []*outbox.Table{events})
		_, err = m.Up(t.Context(), migrations.Latest)
		b.must(err)
		b.must(m.Close())
		role := b.text(`SELECT 'plain_' || current_database()`)
		b.exec(fmt.Sprintf(`CREATE ROLE %s LOGIN`, role))
		t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP ROLE `+role) })
		config := b.config()
		config.URL = strings.Replace(b.url, "postgres@", role+"@", 1)
		plain, err := table.Open(t.Context(), config)
		b.must(err)
		defer plain.Close()
		is := func(what, want string) {
			t.Helper()
			b.is(what, b.unread(b.db), want)
			b.is(what+", to a role that may not read it", b.unread(plain), want)
		}
		is("no row", "")
		b.exec(`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '1', 'placed', '{}')`)
		b.exec(`SELECT pg_stat_force_next_flush()`)
		is("a row of outbox_events", "public.outbox_events")
		b.exec(`CREATE PUBLICATION other FOR TABLE outbox_events WITH (publish_via_partition_root = false)`)
		is("another relay has it", "")
		b.exec(`DROP PUBLICATION other`)
		b.exec(`INSERT INTO outbox_journal (outbox, kind, ids) VALUES ('public.outbox_events', 'stored', '{[1,2)}')`)
		b.is("another relay polls it", b.unread(b.db), "")

		b.insert(1)
		b.table = events
		b.exec(`SELECT pg_stat_force_next_flush()`)
		is("a row of outbox_messages", "public.outbox_messages")
		b.exec(`UPDATE outbox_messages SET processed_at = now()`)
		b.exec(`SELECT pg_stat_force_next_flush()`)
		is("its rows are delivered", "")
	})
}
