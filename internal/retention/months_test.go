package retention_test

import (
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// TestMonthsOfAnOutbox: months are created ahead, and those that are over go when their rows have gone to the archive, or
// are delivered and old enough to be deleted.
func TestMonthsOfAnOutbox(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pgs *testenv.Postgres) {
		month := func(n int) string {
			return partition.MonthName("outbox_messages", partition.MonthOf(time.Now()).AddDate(0, n, 0))
		}
		newMonths := func(mark outbox.Mark) *bench {
			t.Helper()
			b := newBench(t, pgs, mark)
			cfg, err := pgx.ParseConfig(b.url)
			b.must(err)
			m := migrations.New(cfg, []*outbox.Table{b.table})
			defer m.Close()
			_, err = m.PartitionByMonth(t.Context())
			b.must(err)
			for n := -1; n >= -3; n-- {
				at := partition.MonthOf(time.Now()).AddDate(0, n, 0)
				b.exec(`CREATE TABLE ` + month(n) + ` PARTITION OF outbox_messages FOR VALUES FROM (` + partition.MonthBound(at) + `) TO (` + partition.MonthBound(at.AddDate(0, 1, 0)) + `)`)
			}
			b.exec(`DROP TABLE ` + month(2))
			return b
		}
		insert := func(b *bench, month int, processed string) {
			t.Helper()
			b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at, processed_at)
				SELECT 'order', i, 'order.created', '{}', $1, now() - $2::interval FROM generate_series(1, 3) i`, partition.MonthOf(time.Now()).AddDate(0, month, 0), processed)
		}
		b := newMonths(outbox.MarkUpdate)
		insert(b, -3, "2 hours")
		insert(b, -2, "1 minute")
		insert(b, 0, "2 hours")
		r := b.retain()
		if !slices.Contains(r.Created, month(2)) || !slices.Equal(r.Dropped, []string{month(-1)}) || r.Tables[0].Archived != 6 || len(r.Complaints()) > 0 {
			t.Errorf("report %+v", r)
		}
		r = b.retain()
		if len(r.Created) > 0 || !slices.Equal(r.Dropped, []string{month(-3)}) || len(r.Complaints()) > 0 {
			t.Errorf("a second pass: %+v", r)
		}
		b.wantText("storage of a month", `SELECT (reloptions::text ~ 'autovacuum_vacuum_cost_delay=0')::text FROM pg_class WHERE relname = '`+month(2)+`'`, "true")

		deletes := func(o *retention.Options) { o.ArchiveAfter, o.DeleteAfter = 0, time.Hour }
		b = newMonths(outbox.MarkUpdate)
		insert(b, -3, "2 hours")
		b.exec(`UPDATE outbox_messages SET processed_at = NULL WHERE id = 2`)
		insert(b, -2, "2 hours")
		insert(b, -1, "1 minute")
		insert(b, -9, "2 hours") // in the default partition
		insert(b, 0, "2 hours")
		r = b.retain(deletes)
		if !slices.Equal(r.Dropped, []string{month(-2)}) || r.Tables[0].Deleted != 3 || len(r.Complaints()) > 0 {
			t.Errorf("report %+v", r)
		}
		b.exec(`UPDATE outbox_messages SET processed_at = now() - interval '2 hours'`)
		r = b.retain(deletes)
		if !slices.Equal(r.Dropped, []string{month(-3), month(-1)}) || r.Tables[0].Deleted != 0 || len(r.Complaints()) > 0 {
			t.Errorf("a second pass: %+v", r)
		}
		b.wantText("what is left", `SELECT count(*)::text FROM outbox_messages`, "3")

		b = newMonths(outbox.MarkDelete)
		insert(b, -2, "2 hours") // pending: the mark is no time
		r = b.retain(deletes)
		if !slices.Equal(r.Dropped, []string{month(-3), month(-1)}) || len(r.Complaints()) > 0 {
			t.Errorf("mark delete: %+v", r)
		}

		// Behind a producer that has the table's lock, nothing waits for long, and the month is left to the next pass.
		b.exec(`DELETE FROM outbox_messages`)
		held := b.connect()
		tx, err := held.Begin(t.Context())
		b.must(err)
		_, err = tx.Exec(t.Context(), `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.created', '{}')`)
		b.must(err)
		r = b.retain(deletes)
		if len(r.Dropped) > 0 || len(r.Complaints()) != 1 {
			t.Errorf("behind a lock: %+v", r)
		}
		b.must(tx.Commit(t.Context()))
		if r = b.retain(deletes); !slices.Equal(r.Dropped, []string{month(-2)}) {
			t.Errorf("after it: %+v", r)
		}
	})
}

// TestMonthsBelongToTheOwner of the table, whoever creates them, and have what the default partition has. The column of the
// time may have any name.
func TestMonthsBelongToTheOwner(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`DO $$ BEGIN CREATE ROLE months_owner; EXCEPTION WHEN duplicate_object THEN END $$; GRANT ALL ON SCHEMA public TO months_owner;
		DO $$ BEGIN CREATE ROLE months_reader; EXCEPTION WHEN duplicate_object THEN END $$;
		DROP TABLE outbox_messages; CREATE TABLE outbox_messages (id bigint GENERATED ALWAYS AS IDENTITY, aggregate_type text, aggregate_id bigint,
			event_type text, payload jsonb, processed_at timestamptz, attempts smallint, last_error text, available_at timestamptz,
			"Made at" timestamptz NOT NULL DEFAULT now(), PRIMARY KEY (id, "Made at")) PARTITION BY RANGE ("Made at");
		CREATE TABLE rest PARTITION OF outbox_messages DEFAULT; ALTER TABLE rest REPLICA IDENTITY FULL;
		GRANT SELECT ON rest, outbox_messages_archive_default TO months_reader;
		ALTER TABLE outbox_messages OWNER TO months_owner; ALTER TABLE outbox_messages_archive OWNER TO months_owner;
		INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.created', '{}')`)
	b.owner = "months_owner"
	layout := b.table.Layout
	layout.Name, layout.Columns[outbox.OccurredAt] = "custom", "Made at"
	for _, f := range []outbox.Field{outbox.TenantID, outbox.EventVersion, outbox.TraceID} {
		layout.Columns[f] = ""
	}
	table := *b.table
	table.Layout = layout
	r := b.retain(func(o *retention.Options) { o.Tables = []*outbox.Table{&table} })
	if len(r.Created) != 3 || len(r.Complaints()) > 0 {
		t.Errorf("report %+v", r)
	}
	b.wantText("owners and replica identities", `SELECT string_agg(DISTINCT concat(pg_get_userbyid(relowner), ' ', relreplident), ', ')
		FROM pg_class WHERE relname ~ '_20\d\d_\d\d$' AND relkind = 'r'`, "months_owner f")
	b.wantText("others' privileges and TRUNCATE", `SELECT string_agg(DISTINCT concat(has_table_privilege('months_reader', c.oid, 'SELECT'), ' ', c.relname ~ 'archive' = EXISTS (
			SELECT FROM pg_trigger g WHERE g.tgrelid = c.oid AND tgname = 'outbox_no_truncate' AND tgenabled = 'A')), ', ')
		FROM pg_class c WHERE relname ~ '_20\d\d_\d\d$' AND relkind = 'r'`, "t t")
	b.wantText("the row's partition", `SELECT (tableoid::regclass::text ~ '_20\d\d_\d\d$')::text FROM outbox_messages`, "true")
}
