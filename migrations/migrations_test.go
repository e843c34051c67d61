package migrations_test

import (
	"bytes"
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func outboxes() []*outbox.Table {
	return []*outbox.Table{
		{Schema: "public", Name: outbox.DefaultTable, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate},
		{Schema: "public", Name: outbox.AppendTable, Layout: outbox.Append().Journaled(), Mark: outbox.MarkJournal},
	}
}

func foreign() []*outbox.Table {
	return []*outbox.Table{{Schema: "shop", Name: "events", Layout: outbox.Debezium(), Mark: outbox.MarkDelete}}
}

func newRunner(t *testing.T, url string, tables []*outbox.Table) *migrations.Runner {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	r := migrations.New(cfg, tables)
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) }) //nolint:errcheck // the test is over
	return conn
}

func exec(t *testing.T, conn *pgx.Conn, sql string) {
	t.Helper()
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// catalog describes everything in the schema public but the version table, one line each, in a fixed order.
func catalog(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	const describe = `
		SELECT format('table %s %s %s', c.relname, c.relkind, c.reloptions::text || coalesce(t.reloptions::text, ''))
		FROM pg_class c LEFT JOIN pg_class t ON t.oid = c.reltoastrelid
		WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p')
		UNION ALL
		SELECT format('column %s.%s %s %s %s %s %s', a.attrelid::regclass, a.attnum, a.attname, format_type(a.atttypid, a.atttypmod),
			a.attnotnull, a.attidentity, pg_get_expr(d.adbin, d.adrelid))
		FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_attrdef d ON (d.adrelid, d.adnum) = (a.attrelid, a.attnum)
		WHERE c.relnamespace = 'public'::regnamespace AND c.relkind IN ('r', 'p') AND a.attnum > 0 AND NOT a.attisdropped
		UNION ALL SELECT 'index ' || indexdef FROM pg_indexes WHERE schemaname = 'public'
		UNION ALL SELECT format('constraint %s %s %s', conrelid::regclass, conname, pg_get_constraintdef(oid))
		FROM pg_constraint WHERE connamespace = 'public'::regnamespace
		UNION ALL SELECT format('sequence %s', relname) FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'S'`
	rows, err := conn.Query(t.Context(), `SELECT line FROM (`+describe+`) d(line)
		WHERE line NOT LIKE '%' || $1 || '%' ORDER BY line COLLATE "C"`, migrations.VersionTable)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

func TestUpAndDown(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		conn, r := connect(t, url), newRunner(t, url, outboxes())
		empty := catalog(t, conn)
		all := all()
		recorded := func() (n int) {
			err := conn.QueryRow(t.Context(), `SELECT count(*)::int FROM pg_class WHERE relname LIKE $1 || '%' AND relkind = 'r'`, migrations.VersionTable).Scan(&n)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}

		states, err := r.Status(t.Context())
		if err != nil || len(states) != len(all) || !states[0].AppliedAt.IsZero() || recorded() != 0 {
			t.Fatalf("status before = %+v, %v, with %d version tables", states, err, recorded())
		}
		if done, err := r.Up(t.Context(), migrations.Latest); err != nil || !slices.Equal(appliedNames(done), names(all)) {
			t.Fatalf("up = %q, %v", appliedNames(done), err)
		}
		full := catalog(t, conn)
		if recorded() != len(all) {
			t.Errorf("%d version tables, want %d", recorded(), len(all))
		}
		// Down step by step, to nothing, and up again: each down is the opposite of its up.
		for i, m := range slices.Backward(all) {
			done, err := r.Down(t.Context(), migrations.OneStep)
			if err != nil || len(done) != 1 || done[0].Name != m.Name || recorded() != i {
				t.Fatalf("down from %s = %q, %v, with %d version tables", m.Name, appliedNames(done), err, recorded())
			}
		}
		if got := catalog(t, conn); got != empty {
			t.Fatalf("down leaves\n%s", got)
		}
		if done, err := r.Down(t.Context(), migrations.OneStep); err != nil || len(done) != 0 {
			t.Fatalf("down on nothing = %+v, %v", done, err)
		}
		if done, err := r.Up(t.Context(), migrations.Latest); err != nil || len(done) != len(all) {
			t.Fatalf("up = %+v, %v", done, err)
		}
		if got := catalog(t, conn); got != full {
			t.Fatalf("up after down makes\n%s\nwant\n%s", got, full)
		}
		if done, err := r.Up(t.Context(), migrations.Latest); err != nil || len(done) != 0 {
			t.Fatalf("up again = %+v, %v", done, err)
		}
		states, err = r.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range states {
			if age := time.Since(s.AppliedAt); age < -time.Minute || age > 10*time.Minute {
				t.Errorf("%s applied at %v", s.Name, s.AppliedAt)
			}
		}
		if done, err := r.Down(t.Context(), 0); err != nil || len(done) != len(all) {
			t.Fatalf("down to 0 = %+v, %v", done, err)
		}
		if got := catalog(t, conn); got != empty {
			t.Fatalf("down to 0 leaves\n%s", got)
		}
	})
}

// TestTablesThatRelaysChange: a publication of all tables, as other programs make one, keeps no relay from changing its
// tables, and nobody empties one of them by mistake.
func TestTablesThatRelaysChange(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		url := pg.NewDB(t)
		conn := connect(t, url)
		if _, err := newRunner(t, url, outboxes()).Up(t.Context(), migrations.Latest); err != nil {
			t.Fatal(err)
		}
		exec(t, conn, "CREATE PUBLICATION theirs FOR ALL TABLES")
		rows, err := conn.Query(t.Context(), `SELECT oid::regclass::text FROM pg_class
			WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p') ORDER BY 1`)
		if err != nil {
			t.Fatal(err)
		}
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			for _, change := range []string{"UPDATE " + name + " SET %s", "DELETE FROM " + name} {
				column := ""
				if err := conn.QueryRow(t.Context(), `SELECT attname || ' = ' || attname FROM pg_attribute
					WHERE attrelid = $1::text::regclass AND attnum > 0 AND attidentity <> 'a' LIMIT 1`, name).Scan(&column); err != nil {
					t.Fatal(err)
				}
				if _, err := conn.Exec(t.Context(), "EXPLAIN "+strings.ReplaceAll(change, "%s", column)); err != nil {
					t.Errorf("%s: %v", change, err)
				}
			}
			if name == outbox.DefaultTable || !strings.HasPrefix(name, "outbox_") {
				continue
			}
			if _, err := conn.Exec(t.Context(), "TRUNCATE "+name); err == nil || !strings.Contains(err.Error(), "is refused") {
				t.Errorf("TRUNCATE %s: %v", name, err)
			}
		}
	})
}

// The names, order and types of the outbox's columns are a contract with producers in every language.
func TestOutboxColumns(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn, r := connect(t, url), newRunner(t, url, outboxes())
	if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	const want = `id bigint, tenant_id bigint, aggregate_type text, aggregate_id bigint, event_type text, event_version smallint, ` +
		`payload jsonb, occurred_at timestamp with time zone, available_at timestamp with time zone, ` +
		`processed_at timestamp with time zone, attempts smallint, last_error text, trace_id text`
	var got string
	if err := conn.QueryRow(t.Context(), `
		SELECT string_agg(column_name || ' ' || data_type, ', ' ORDER BY ordinal_position)
		FROM information_schema.columns WHERE table_name = 'outbox_messages'`).Scan(&got); err != nil || got != want {
		t.Errorf("columns = %s\nwant %s (%v)", got, want, err)
	}
	for _, c := range outbox.Canonical().Columns {
		if c != "" && !strings.Contains(want, c+" ") {
			t.Errorf("the canonical layout names %s", c)
		}
	}

	// What a producer has to say, a dead letter that comes back under its id, and a row on its way to the archive, where an
	// id may come again.
	exec(t, conn, `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 7, 'order.placed', '{}')`)
	exec(t, conn, `INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload) VALUES (-5, 'order', 7, 'order.placed', '{}')`)
	exec(t, conn, `UPDATE outbox_messages SET processed_at = now()`)
	for range 2 {
		exec(t, conn, `INSERT INTO outbox_messages_archive SELECT 'public.outbox_messages', * FROM outbox_messages`)
	}
	exec(t, conn, `INSERT INTO outbox_messages_dlq (outbox, row_id, original) SELECT 'public.outbox_messages', id::text, row_to_json(o) FROM outbox_messages o`)
}

func TestUpConcurrently(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	var wg sync.WaitGroup
	var mu sync.Mutex
	total := 0
	for range 4 {
		r := newRunner(t, url, outboxes())
		wg.Go(func() {
			done, err := r.Up(t.Context(), migrations.Latest)
			mu.Lock()
			defer mu.Unlock()
			total += len(done)
			if err != nil {
				t.Errorf("up = %v", err)
			}
		})
	}
	wg.Wait()
	if total != len(all()) {
		t.Errorf("%d migrations were applied by all together", total)
	}
}

func TestPrintMakesTheSameSchema(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	for _, tables := range [][]*outbox.Table{outboxes(), foreign()} {
		var sql bytes.Buffer
		if err := migrations.Print(&sql, migrations.Latest, "public", tables); err != nil {
			t.Fatal(err)
		}
		if strings.Contains(sql.String(), "drop below") || strings.Contains(sql.String(), "DROP ") || strings.Contains(sql.String(), "{schema}") {
			t.Errorf("print leaves a mark or what down does:\n%s", &sql)
		}
		printed, upped := pg.NewDB(t), pg.NewDB(t)
		var got [2]string
		for i, url := range []string{printed, upped} {
			conn := connect(t, url)
			if i == 0 {
				exec(t, conn, sql.String())
			} else {
				r := newRunner(t, url, tables)
				r.Own.Schema = "public"
				if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
					t.Fatal(err)
				}
			}
			got[i] = catalog(t, conn)
		}
		if got[0] != got[1] {
			t.Errorf("print makes\n%s\nup makes\n%s", got[0], got[1])
		}
	}
}

// TestPrintOffersIndexesForShards: they fit the canonical table, and a table of one relay gets none.
func TestPrintOffersIndexesForShards(t *testing.T) {
	tables := outboxes()
	tables[0].Mark, tables[0].Shard = outbox.MarkUpdate, outbox.Shard{Index: 2, Of: 3}
	var sql bytes.Buffer
	if err := migrations.Print(&sql, migrations.Latest, "public", tables); err != nil {
		t.Fatal(err)
	}
	conn := connect(t, testenv.SharedPostgres(t).NewDB(t))
	exec(t, conn, sql.String())
	var n int
	err := conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_indexes WHERE tablename = 'outbox_messages' AND indexdef LIKE '%abs(%hash_record_extended%'`).Scan(&n)
	if err != nil || n != 2 {
		t.Errorf("%d indexes for shards: %v", n, err)
	}
}

func TestDownRefusesWhatIsUndelivered(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn, r := connect(t, url), newRunner(t, url, outboxes())
	if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	steps := []struct{ fill, text, clear string }{
		{
			`INSERT INTO idempotency_keys (tenant_id, scope, key, request_hash, token) VALUES (0, 's', 'k', '', gen_random_uuid())`,
			"keys that have not expired", `UPDATE idempotency_keys SET expires_at = now()`,
		},
		{
			`INSERT INTO consumer_offsets (consumer_name) VALUES ('mailer')`,
			"positions of consumers", `TRUNCATE consumer_offsets`,
		},
		{
			`INSERT INTO consumer_definitions (consumer_name, stream, partitions, start_at, start_sequence) VALUES ('mailer', 'EVENTS', 4, 'new', 17)`,
			"positions of consumers", `TRUNCATE consumer_definitions`,
		},
		{
			`INSERT INTO consumer_parked (consumer_name, partition_hash, sequence, event_source, event_id, event_type, event) VALUES ('mailer', 1, 2, 's', 'i', 't', '')`,
			"consumer_parked holds events that were not handled", `TRUNCATE consumer_parked`,
		},
		{
			`INSERT INTO consumer_seen VALUES (gen_random_uuid(), 'mailer', now())`,
			"consumer_seen holds the ids of handled events", `TRUNCATE consumer_seen`,
		},
		{ // the progress was one of other partitions
			`INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'e', '{}');
			INSERT INTO outbox_known (outbox, condition, database_oid, own_oid, table_oid, timeline, partitions, table_name, source, unsettled)
				VALUES ('public.outbox_events', '', 0, 0, 'outbox_events'::regclass, 1, 17, '', '', '{[2,)}')`,
			"outbox_events holds 1 undelivered row(s)", `DELETE FROM outbox_events`,
		},
		{
			`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('a', 1, 'e', '{}')`,
			"outbox_messages holds 1 undelivered row(s)", `UPDATE outbox_messages SET processed_at = now()`,
		},
		{
			`INSERT INTO outbox_messages_dlq (outbox, row_id) VALUES ('public.outbox_messages', '1')`,
			"outbox_messages_dlq holds 1 undelivered row(s)", `DELETE FROM outbox_messages_dlq`,
		},
		{
			`INSERT INTO outbox_replays (slot, outbox) VALUES ('walpost', 'public.outbox_messages')`,
			"outbox_replays holds 1 unfinished request(s)", `UPDATE outbox_replays SET state = 'cancelled'`,
		},
		{
			`INSERT INTO outbox_journal (outbox, kind, ids) VALUES ('public.outbox_messages', 'stored', '{[1,1]}')`,
			"outbox_journal says which events were delivered", `DELETE FROM outbox_journal`,
		},
	}
	for _, s := range steps {
		exec(t, conn, s.fill)
	}
	full := catalog(t, conn)
	for _, s := range steps {
		done, err := r.Down(t.Context(), 0)
		if err == nil || len(done) > 0 || !strings.Contains(err.Error(), s.text) || hint.Of(err) == "" {
			t.Fatalf("down = %v, %v, hint %q; want nothing, %q and a hint", done, err, hint.Of(err), s.text)
		}
		if got := catalog(t, conn); got != full {
			t.Fatalf("down was refused (%v) and leaves\n%s", err, got)
		}
		exec(t, conn, s.clear)
	}
	if _, err := r.Down(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
}

// The names, order and types of the columns are a contract with applications in every language.
func TestIdempotencyColumns(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	if _, err := newRunner(t, url, outboxes()).Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	const want = `tenant_id bigint, scope text, key text, request_hash bytea, response jsonb, status_code smallint, state text, ` +
		`created_at timestamp with time zone, completed_at timestamp with time zone, expires_at timestamp with time zone, ` +
		`response_body bytea, response_headers jsonb, token uuid, lease_until timestamp with time zone`
	var got, key string
	if err := connect(t, url).QueryRow(t.Context(), `
		SELECT string_agg(column_name || ' ' || data_type, ', ' ORDER BY ordinal_position),
			(SELECT pg_get_constraintdef(oid) FROM pg_constraint WHERE conrelid = 'idempotency_keys'::regclass AND contype = 'p')
		FROM information_schema.columns WHERE table_name = 'idempotency_keys'`).Scan(&got, &key); err != nil || got != want {
		t.Errorf("columns = %s\nwant %s (%v)", got, want, err)
	}
	if key != "PRIMARY KEY (tenant_id, scope, key)" {
		t.Errorf("key = %s", key)
	}
}

func TestForeignOutboxTable(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn, r := connect(t, url), newRunner(t, url, outboxes())
	exec(t, conn, `CREATE TABLE outbox_messages (note TEXT); INSERT INTO outbox_messages VALUES ('mine')`)
	before := catalog(t, conn)
	done, err := r.Up(t.Context(), migrations.Latest)
	if err == nil || len(done) != 0 || !strings.HasPrefix(err.Error(), `apply outbox_messages/0001_table.sql: ERROR: relation "outbox_messages" already exists`) {
		t.Fatalf("up = %+v, %v", done, err)
	}
	if !strings.Contains(hint.Of(err), "outboxes[].layout") {
		t.Errorf("hint = %q", hint.Of(err))
	}
	if after := catalog(t, conn); after != before {
		t.Errorf("up changed the schema to\n%s", after)
	}
}

func TestOtherOutbox(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn, r := connect(t, url), newRunner(t, url, foreign())
	r.Own.Schema = "public"
	without := []string{"relay/0001_tables.sql", "consumer/0001_tables.sql", "idempotency/0001_table.sql"}
	done, err := r.Up(t.Context(), migrations.Latest)
	if err != nil || !slices.Equal(appliedNames(done), without) {
		t.Fatalf("up = %q, %v", appliedNames(done), err)
	}
	status := func(want []string) {
		t.Helper()
		var got []string
		states, err := r.Status(t.Context())
		for _, s := range states {
			got = append(got, s.Name)
		}
		if err != nil || !slices.Equal(got, want) {
			t.Fatalf("status lists %q, %v", got, err)
		}
	}
	status(without)
	if strings.Contains(catalog(t, conn), "table outbox_messages r") {
		t.Error("outbox_messages was created beside another outbox")
	}

	// The application moves to the canonical table later.
	later := newRunner(t, url, outboxes())
	done, err = later.Up(t.Context(), migrations.Latest)
	if err != nil || !slices.Equal(appliedNames(done), []string{"outbox_messages/0001_table.sql", "outbox_events/0001_table.sql"}) {
		t.Fatalf("up = %q, %v", appliedNames(done), err)
	}
	status(names(all())) // also of a runner whose outbox is another table
	if _, err := r.Down(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
}

// TestSchema: the tables are made in the first outbox's schema, whatever the role's search_path is. One that does not exist is named.
func TestSchema(t *testing.T) {
	url := testenv.SharedPostgres(t).NewDB(t)
	conn := connect(t, url)
	exec(t, conn, `CREATE SCHEMA relay`)
	tables := outboxes()
	for _, table := range tables {
		table.Schema = "relay"
	}
	if done, err := newRunner(t, url, tables).Up(t.Context(), migrations.Latest); err != nil || len(done) != len(all()) {
		t.Fatalf("up = %+v, %v", done, err)
	}
	var others int
	if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM pg_class WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace`).Scan(&others); err != nil || others > 0 {
		t.Errorf("%d tables in public, %v", others, err)
	}
	r := newRunner(t, url, tables)
	r.Own.Schema = "nowhere"
	_, err := r.Up(t.Context(), migrations.Latest)
	if err == nil || !strings.Contains(hint.Of(err), "create the schema") {
		t.Errorf("up without a schema = %v, hint %q", err, hint.Of(err))
	}
}

// Up, down and status refuse a database that other files have made, and change nothing.
func TestOtherBuilds(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	const consumer = "public.walpost_migrations_consumer"
	for name, c := range map[string]struct{ change, want, hint string }{
		"newer": {
			`INSERT INTO ` + consumer + ` VALUES (2, 'later')`,
			`a newer walpost has made the tables: "public".walpost_migrations_consumer has version 2, this one knows 1`, "of the version that made the tables",
		},
		"gap": {
			`UPDATE ` + consumer + ` SET version = 2`,
			`"public".walpost_migrations_consumer has version 2 and no version 1`, "from a backup",
		},
		"other file": {
			`UPDATE ` + consumer + ` SET hash = md5('')`,
			"another build of walpost has applied consumer/0001_tables.sql", "`walpost migrate down --to 0` of the build",
		},
		"before groups": {
			`CREATE TABLE walpost_migrations (version_id bigint)`,
			`those of a build before the first release: they are in "public".walpost_migrations`, `DROP TABLE "public".walpost_migrations`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			url := pg.NewDB(t)
			conn, r := connect(t, url), newRunner(t, url, outboxes())
			if _, err := newGroupRunner(t, url, migrations.Consumer).Up(t.Context(), migrations.Latest); err != nil {
				t.Fatal(err)
			}
			exec(t, conn, c.change)
			before := catalog(t, conn)
			_, up := r.Up(t.Context(), migrations.Latest)
			_, down := r.Down(t.Context(), 0)
			_, status := r.Status(t.Context())
			for _, err := range []error{up, down, status} {
				if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(hint.Of(err), c.hint) {
					t.Errorf("error %v, hint %q", err, hint.Of(err))
				}
			}
			if got := catalog(t, conn); got != before {
				t.Errorf("the schema has become\n%s", got)
			}
		})
	}
}

// TestOutboxElsewhere: an outbox of the default name, but not in the schema where the migrations make tables, is refused
// with a hint that names that schema.
func TestOutboxElsewhere(t *testing.T) {
	conn := connect(t, testenv.SharedPostgres(t).NewDB(t))
	err := migrations.CheckOutboxes(t.Context(), conn, outboxes(), "app")
	if err == nil || !strings.Contains(hint.Of(err), "migrations make app.outbox_messages") {
		t.Errorf("error %v, hint %q", err, hint.Of(err))
	}
}

// TestOtherObjects: functions that are there already, and what depends on walpost's tables, stop up and down. The hint
// says what to do, and nothing that the command cannot.
func TestOtherObjects(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	url := pg.NewDB(t)
	conn, r := connect(t, url), newRunner(t, url, outboxes())
	refused := func(err error, want, advice string) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(hint.Of(err), advice) {
			t.Errorf("error %v, hint %q, want %s, %s", err, hint.Of(err), want, advice)
		}
	}
	exec(t, conn, `CREATE FUNCTION outbox_append_only() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN new; END'`)
	_, err := r.Up(t.Context(), migrations.Latest)
	refused(err, `"outbox_append_only"`, "rename or drop it")
	exec(t, conn, `DROP FUNCTION outbox_append_only()`)
	if _, err := r.Up(t.Context(), migrations.Latest); err != nil {
		t.Fatal(err)
	}
	exec(t, conn, `CREATE VIEW events AS SELECT * FROM outbox_messages`)
	_, err = r.Down(t.Context(), 0)
	refused(err, "outbox_messages", "first drop what depends on it")
	exec(t, conn, `DROP VIEW events; ALTER TABLE outbox_messages_dlq RENAME TO gone`)
	_, err = r.Down(t.Context(), 0)
	refused(err, "outbox_messages_dlq", "DROP TABLE walpost_migrations_<line>")
	exec(t, conn, `ALTER TABLE gone RENAME TO outbox_messages_dlq`)
	if _, err := r.Down(t.Context(), 0); err != nil {
		t.Error(err)
	}
}

func TestWithoutPrivileges(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	url := pg.NewDB(t)
	exec(t, connect(t, url), `REVOKE CREATE ON SCHEMA public FROM PUBLIC; CREATE ROLE pauper LOGIN`)
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	_, err = newRunner(t, pg.URLFor("pauper", cfg.Database), outboxes()).Up(t.Context(), migrations.Latest)
	if err == nil || !strings.Contains(err.Error(), "permission denied") || !strings.Contains(hint.Of(err), "CREATE on the schema") {
		t.Errorf("error %v, hint %q", err, hint.Of(err))
	}
}
