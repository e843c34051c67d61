package migrations_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

// partsSQL lists the partitions of outbox_messages with their rows, the default one last.
const partsSQL = `SELECT string_agg(concat(c.relname, ' ', (SELECT count(*) FROM outbox_messages o WHERE o.tableoid = c.oid)), ', '
	ORDER BY pg_get_expr(c.relpartbound, c.oid) = 'DEFAULT', c.relname COLLATE "C" DESC) FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid WHERE i.inhparent = 'outbox_messages'::regclass`

func text(t *testing.T, conn *pgx.Conn, sql string) (s string) {
	t.Helper()
	if err := conn.QueryRow(t.Context(), sql, pgx.QueryExecModeSimpleProtocol).Scan(&s); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return s
}

// TestPartitionByMonth: what the table was, the partitioned one is, and its rows stay where they are.
func TestPartitionByMonth(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pgs *testenv.Postgres) {
		url := pgs.NewDB(t)
		conn := connect(t, url)
		r := newRunner(t, url, outboxes()[:1])
		if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
			t.Fatal(err)
		}
		byMonth := func(want string) {
			t.Helper()
			done, err := r.PartitionByMonth(t.Context())
			if got := strings.Join(done, "; "); err != nil || got != want {
				t.Fatalf("done %q, %v, want %q", got, err, want)
			}
		}
		const insert = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at) VALUES ('a', 1, 'b.c', '{}', now() + %s) RETURNING id::text`
		month := func(n int) string {
			return partition.MonthName("outbox_messages", partition.MonthOf(time.Now()).AddDate(0, n, 0))
		}
		role := "reader_" + text(t, conn, `SELECT current_database()::text`)
		exec(t, conn, `CREATE ROLE `+role)
		t.Cleanup(func() {
			_ = pgs.Exec(context.Background(), conn.Config().Database, `DROP OWNED BY `+role+`; DROP ROLE `+role)
		})
		setUp := `CREATE PUBLICATION walpost FOR TABLE outbox_messages WITH (publish = 'insert', publish_via_partition_root = true);
			GRANT SELECT, UPDATE (processed_at) ON outbox_messages TO ` + role + `; COMMENT ON TABLE outbox_messages IS 'it''s one';
			CREATE FUNCTION odd() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.trace_id := TG_NAME; RETURN NEW; END';
			CREATE TRIGGER odd BEFORE INSERT ON outbox_messages FOR EACH ROW EXECUTE FUNCTION odd(); ALTER TABLE outbox_messages ENABLE ALWAYS TRIGGER odd;
			CREATE VIEW facts AS SELECT concat_ws(E'\n', (SELECT string_agg(x, ' ' ORDER BY x) FROM unnest(c.relacl::text[]) x), pg_get_userbyid(relowner),
				(SELECT string_agg(concat(attname, attacl, attnotnull, attidentity), ' ' ORDER BY attnum) FROM pg_attribute a WHERE attrelid = c.oid AND attnum > 0),
				(SELECT string_agg(concat(tgname, tgenabled), ' ' ORDER BY tgname) FROM pg_trigger WHERE tgrelid = c.oid),
				(SELECT string_agg(regexp_replace(pg_get_indexdef(i.indexrelid), '^.* USING', ''), ' ' ORDER BY regexp_replace(pg_get_indexdef(i.indexrelid), '^.* USING', '')) FROM pg_index i WHERE i.indrelid = c.oid AND NOT i.indisprimary),
				(SELECT string_agg(tablename, ' ') FROM pg_publication_tables WHERE pubname = 'walpost'), obj_description(c.oid, 'pg_class')) AS fact
			FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.relname = 'outbox_messages' AND n.nspname = 'public'`
		exec(t, conn, setUp)
		if _, err := r.InstallNotify(t.Context()); err != nil {
			t.Fatal(err)
		}
		was := text(t, conn, `SELECT fact FROM facts`)
		for _, age := range []string{"'-1 year'", "'-1 month'", "'0'"} {
			exec(t, conn, fmt.Sprintf(insert, age+"::interval"))
		}
		end := partition.MonthOf(time.Now()).AddDate(0, 2, 0)
		byMonth("partitioned public.outbox_messages by month: its rows are in public.outbox_messages_old, which takes those up to " + end.Format(time.DateOnly))
		if is := text(t, conn, `SELECT fact FROM facts`); is != was {
			t.Errorf("the table was\n%s\nand is\n%s", was, is)
		}
		if id := text(t, conn, fmt.Sprintf(insert, "interval '0'")); id != "4" {
			t.Errorf("the next id is %s, want 4", id)
		}
		exec(t, conn, fmt.Sprintf(insert, "interval '90 days'")+"; "+fmt.Sprintf(insert, "interval '1 year'"))
		parts := text(t, conn, partsSQL)
		if !strings.HasPrefix(parts, "outbox_messages_old 4, "+month(2)+" ") || !strings.Contains(parts, ", outbox_messages_default ") {
			t.Errorf("the partitions are %s", parts)
		}
		if n := text(t, conn, `SELECT count(*)::text FROM outbox_messages WHERE trace_id IS DISTINCT FROM 'odd'`); n != "0" {
			t.Errorf("%s rows were inserted without the trigger", n)
		}
		for _, of := range []string{"outbox_messages_old", month(2), "outbox_messages_default"} {
			if got := text(t, conn, `SELECT concat((SELECT reloptions::text FROM pg_class WHERE oid = '`+of+`'::regclass) ~ 'autovacuum_vacuum_cost_delay=0', ' ', (
				SELECT count(*) FROM pg_constraint WHERE conname = 'walpost_bounds'))`); got != "t 0" {
				t.Errorf("%s has storage parameters and constraints: %s", of, got)
			}
		}
		byMonth("")
		if _, err := r.Down(t.Context(), 0); err == nil || !strings.Contains(err.Error(), "6 undelivered") {
			t.Errorf("down says %v", err)
		}

		exec(t, conn, `DROP VIEW facts; DELETE FROM outbox_messages`)
		if _, err := r.Down(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
		if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
			t.Fatal(err)
		}
		byMonth("partitioned public.outbox_messages by month: it was empty")
		exec(t, conn, fmt.Sprintf(insert, "interval '0'"))
		if parts, want := text(t, conn, partsSQL), fmt.Sprintf("%s 0, %s 0, %s 1, outbox_messages_default 0", month(2), month(1), month(0)); parts != want {
			t.Errorf("the partitions are %s, want %s", parts, want)
		}
	})
}

// TestPartitionByMonthRefuses what would not be the same afterwards, and leaves the table as it was.
func TestPartitionByMonthRefuses(t *testing.T) {
	pgs := testenv.SharedPostgres(t)
	for name, c := range map[string]struct{ setUp, want, hint string }{
		"view":         {`CREATE VIEW pending AS SELECT * FROM outbox_messages WHERE processed_at IS NULL`, "it has view public.pending", "drop it"},
		"foreign key":  {`CREATE TABLE of (id bigint REFERENCES outbox_messages)`, "it has constraint of_id_fkey of public.of", "drop it"},
		"unique index": {`CREATE UNIQUE INDEX one ON outbox_messages (trace_id)`, "it has unique index public.one, which lacks occurred_at", "drop it"},
		"policies":     {`ALTER TABLE outbox_messages ENABLE ROW LEVEL SECURITY`, "it has row level security", "turn it off"},
		"heir":         {`CREATE TABLE heir () INHERITS (outbox_messages)`, "it inherits, or is inherited from", ""},
		"other parts":  {`DROP TABLE outbox_messages; CREATE TABLE outbox_messages (id bigint, occurred_at timestamptz) PARTITION BY HASH (id)`, "it is partitioned by HASH (id)", ""},
		"no time zone": {`ALTER TABLE outbox_messages ALTER occurred_at TYPE timestamp`, "occurred_at has timestamp without time zone", "timestamptz"},
		"future": {
			`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, occurred_at) VALUES ('a', 1, 'b.c', '{}', 'infinity')`,
			`check constraint "walpost_bounds" of relation "outbox_messages" is violated by some row`, "a row has no occurred_at, or one at or after ",
		},
		"name": {`CREATE TABLE outbox_messages_old ()`, `relation "outbox_messages_old" already exists`, "rename that table"},
		"privileges": {
			`CREATE ROLE months LOGIN`,
			"the role lacks privilege UPDATE on table outbox_known", "GRANT UPDATE ON",
		},
		"missing": {`DROP TABLE outbox_messages`, "the table does not exist", "outboxes[].table"},
	} {
		t.Run(name, func(t *testing.T) {
			url := pgs.NewDB(t)
			conn := connect(t, url)
			r := newRunner(t, url, outboxes()[:1])
			if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
				t.Fatal(err)
			}
			exec(t, conn, c.setUp)
			const catalog = `SELECT coalesce(string_agg(concat(c.oid, c.relname, c.relkind, (SELECT string_agg(conname, ' ' ORDER BY conname) FROM pg_constraint WHERE conrelid = c.oid)), ' ' ORDER BY c.oid), '')
				FROM pg_class c WHERE relnamespace = 'public'::regnamespace`
			was := text(t, conn, catalog)
			if name == "privileges" {
				url = strings.Replace(url, "postgres@", "months@", 1)
			}
			done, err := newRunner(t, url, outboxes()[:1]).PartitionByMonth(t.Context())
			if err == nil || !strings.HasPrefix(err.Error(), "partition public.outbox_messages by month: ") || !strings.Contains(err.Error(), c.want) || !strings.Contains(hint.Of(err), c.hint) {
				t.Errorf("%q, %v (%s)", done, err, hint.Of(err))
			}
			if is := text(t, conn, catalog); is != was {
				t.Errorf("the catalog had\n%s\nand has\n%s", was, is)
			}
		})
	}
	other := *outboxes()[0]
	other.Mark = outbox.MarkJournal
	if _, err := newRunner(t, pgs.NewDB(t), []*outbox.Table{&other}).PartitionByMonth(t.Context()); err == nil || !strings.Contains(hint.Of(err), "update or delete") {
		t.Errorf("an append-only outbox: %v", err)
	}
}

// TestPartitionByMonthWaitsPolitely for those who use the table, and gives up without a trace.
func TestPartitionByMonthWaitsPolitely(t *testing.T) {
	t.Parallel()
	url := testenv.SharedPostgres(t).NewDB(t)
	reader, producer, r := connect(t, url), connect(t, url), newRunner(t, url, outboxes()[:1])
	if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	byMonth := func() {
		_, err := r.PartitionByMonth(t.Context())
		ended <- err
	}
	exec(t, reader, `BEGIN; LOCK TABLE outbox_messages IN ACCESS SHARE MODE`)
	go byMonth()
	const insert = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'b.c', '{}')`
	var longest time.Duration
	for waiting := true; waiting; time.Sleep(5 * time.Millisecond) {
		begun := time.Now()
		exec(t, producer, insert)
		longest = max(longest, time.Since(begun))
		select {
		case err := <-ended:
			if waiting = false; err == nil || !strings.Contains(hint.Of(err), "pg_stat_activity") {
				t.Errorf("behind a lock: %v (%s)", err, hint.Of(err))
			}
		default:
		}
	}
	t.Logf("an insert took %s at most", longest)
	if got := text(t, producer, `SELECT concat((SELECT count(*) FROM pg_constraint WHERE conname = 'walpost_bounds'), (SELECT count(*) FROM pg_class WHERE relname ~ 'by_month'), relkind) FROM pg_class WHERE relname = 'outbox_messages'`); got != "00r" {
		t.Errorf("it leaves %s", got)
	}
	exec(t, reader, `COMMIT`)
	go byMonth()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestPartitionByMonthIsCancelled while it indexes the key, which waits for an older snapshot: nothing of it stays.
func TestPartitionByMonthIsCancelled(t *testing.T) {
	t.Parallel()
	url := testenv.SharedPostgres(t).NewDB(t)
	reader, other, r := connect(t, url), connect(t, url), newRunner(t, url, outboxes()[:1])
	if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	exec(t, reader, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := r.PartitionByMonth(ctx)
		ended <- err
	}()
	for waits := "f"; waits == "f"; time.Sleep(10 * time.Millisecond) {
		waits = text(t, other, `SELECT left(EXISTS (SELECT FROM pg_stat_activity WHERE query ~ 'CONCURRENTLY' AND wait_event = 'virtualxid' AND pid <> pg_backend_pid())::text, 1)`)
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("it has ended without an error")
	}
	if got := text(t, other, `SELECT concat((SELECT count(*) FROM pg_constraint WHERE conname = 'walpost_bounds'), (SELECT count(*) FROM pg_class WHERE relname ~ 'by_month'), relkind) FROM pg_class WHERE relname = 'outbox_messages'`); got != "00r" {
		t.Errorf("it leaves %s", got)
	}
	exec(t, reader, `COMMIT`)
	if done, err := r.PartitionByMonth(t.Context()); err != nil || len(done) != 1 {
		t.Errorf("again: %q, %v", done, err)
	}
}
