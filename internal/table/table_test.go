package table_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// bench is a database with the canonical tables, the relay's connection to it
// and an application's.
type bench struct {
	t     *testing.T
	url   string
	db    *table.DB
	app   *pgx.Conn
	table *outbox.Table
}

func newBench(t *testing.T, pg *testenv.Postgres, mark outbox.Mark) *bench {
	t.Helper()
	b := &bench{t: t}
	b.table = &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: mark}
	if mark == outbox.MarkJournal {
		b.table.Layout = outbox.Canonical().Journaled()
	}
	b.url = pg.CopyDB(t, "canonical "+string(mark), b.migrate)
	b.app = b.connect()
	if table.Journals(b.table) {
		b.exec(strings.Join(table.AppendOnlySQL(b.table, "public."+table.AppendOnly), ";"))
	}
	b.db = b.open()
	b.must(b.db.CheckTable(t.Context(), b.table))
	b.must(b.db.Know(t.Context(), b.table, "test"))
	return b
}

// migrate makes walpost's tables in a database.
func (b *bench) migrate(url string) {
	b.t.Helper()
	cfg, err := pgx.ParseConfig(url)
	b.must(err)
	m := migrations.New(cfg, []*outbox.Table{b.table})
	_, err = m.Up(b.t.Context(), migrations.Latest)
	b.must(errors.Join(err, m.Close()))
}

func (b *bench) config() table.Config {
	return table.Config{URL: b.url, Settings: stream.Settings, Slot: "walpost", Own: pg.OwnOf("", "", []*outbox.Table{b.table})}
}

// open connects without the limits that a slow machine meets: a relay pings its connection.
func (b *bench) open() *table.DB {
	b.t.Helper()
	db, err := table.Open(b.t.Context(), b.config())
	b.must(err)
	b.t.Cleanup(db.Close)
	b.must(db.Limit(b.t.Context(), testenv.Patience))
	b.must(db.Use(b.t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
		_, err := conn.Exec(ctx, `SET idle_session_timeout = 0; SET idle_in_transaction_session_timeout = 0`)
		return err
	}))
	return db
}

func (b *bench) connect() *pgx.Conn {
	b.t.Helper()
	c, err := pgx.Connect(b.t.Context(), b.url)
	b.must(err)
	b.t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func (b *bench) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

// insert commits n rows and names them as the WAL would.
func (b *bench) insert(n int) (rows []table.Row) {
	b.t.Helper()
	result, err := b.app.Query(b.t.Context(), fmt.Sprintf(`INSERT INTO outbox_messages AS t (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', i, 'order.created', jsonb_build_object('n', i) FROM generate_series(1, $1) i
		RETURNING id::text, %s, pg_current_xact_id()::xid::text::bigint`, b.table.HashSQL("t")), n)
	b.must(err)
	var id string
	var hash, xid int64
	_, err = pgx.ForEachRow(result, []any{&id, &hash, &xid}, func() error {
		rows = append(rows, table.Row{Ref: outbox.Ref{Table: b.table, ID: id, Hash: uint64(hash)}, XID: uint32(xid)})
		return nil
	})
	b.must(err)
	return rows
}

func (b *bench) mark(rows []table.Row) []table.Verdict {
	b.t.Helper()
	v, err := b.db.Mark(b.t.Context(), b.table, rows)
	b.must(err)
	return v
}

func (b *bench) exec(sql string, args ...any) {
	b.t.Helper()
	_, err := b.app.Exec(b.t.Context(), sql, args...)
	b.must(err)
}

func (b *bench) text(sql string) (s string) {
	b.t.Helper()
	b.must(b.app.QueryRow(b.t.Context(), "SELECT ("+sql+")::text").Scan(&s))
	return s
}

func (b *bench) want(got []table.Verdict, want ...table.Verdict) {
	b.t.Helper()
	if !slices.Equal(got, want) {
		b.t.Fatalf("verdicts %v, want %v", got, want)
	}
}

func TestMarkTakesRowsOut(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		for mark, left := range map[outbox.Mark]string{
			outbox.MarkUpdate: `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`,
			outbox.MarkDelete: `SELECT count(*) FROM outbox_messages`,
		} {
			b := newBench(t, pg, mark)
			rows := b.insert(1000)
			verdicts := b.mark(rows[:999])
			if i := slices.IndexFunc(verdicts, func(v table.Verdict) bool { return v != table.Done }); i >= 0 {
				t.Fatalf("%s: row %d: %v", mark, i, verdicts[i])
			}
			if n := b.text(left); n != "1" {
				t.Errorf("%s: %s rows are left, want 1", mark, n)
			}
			again := table.Done // it is marked
			if mark == outbox.MarkDelete {
				again = table.Gone
			}
			b.want(b.mark(rows[:2]), again, again)
		}
	})
}

func TestMarkLeavesAnotherRowAlone(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	stored := b.insert(2)
	b.exec(`TRUNCATE outbox_messages RESTART IDENTITY`)
	b.insert(1) // id 1 comes again
	b.want(b.mark(stored), table.Done, table.Gone)
	if n := b.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`); n != "0" {
		t.Fatal("the mark of an old row took a new one out")
	}
	changed := b.insert(1)
	b.exec(`UPDATE outbox_messages SET payload = '{"changed": true}' WHERE id = $1`, 2)
	b.want(b.mark(changed), table.Done)
	if n := b.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`); n != "0" {
		t.Fatal("a row was marked although its content was never stored")
	}
	b.exec(`UPDATE outbox_messages SET attempts = 3, last_error = 'x', available_at = now() + interval '1 hour' WHERE id = 1`)
}

// TestARetryIsTheSameRow: bookkeeping and columns that the layout does not map
// are no part of a row's identity.
func TestARetryIsTheSameRow(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(1)
	b.exec(`UPDATE outbox_messages SET attempts = 3, last_error = 'x', available_at = now() + interval '1 hour'`)
	b.exec(`ALTER TABLE outbox_messages ADD COLUMN region TEXT DEFAULT 'eu'`)
	b.want(b.mark(rows), table.Done)
	if n := b.text(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`); n != "1" {
		t.Fatal("the row was not recognised")
	}
}

func TestMarkPassesOverLockedRows(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(3)
	tx, err := b.app.Begin(t.Context())
	b.must(err)
	_, err = tx.Exec(t.Context(), `SELECT FROM outbox_messages WHERE id = 2 FOR UPDATE`)
	b.must(err)
	b.want(b.mark(rows), table.Done, table.Locked, table.Done)
	who, err := b.db.Blocker(t.Context(), b.table, "2")
	b.must(err)
	if !strings.Contains(who, fmt.Sprintf("pid %d,", b.app.PgConn().PID())) {
		t.Errorf("the blocker is %q, want pid %d", who, b.app.PgConn().PID())
	}
	b.must(tx.Rollback(t.Context()))
	b.want(b.mark(rows[1:2]), table.Done)
}

func TestMarkGivesWayToAlterTable(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(1)
	tx, err := b.app.Begin(t.Context())
	b.must(err)
	_, err = tx.Exec(t.Context(), `LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE`)
	b.must(err)
	if _, err := b.db.Mark(t.Context(), b.table, rows); !table.IsTemporary(err) || !b.db.Alive() {
		t.Fatalf("%v, want a failure that passes, on a connection that lives", err)
	}
	b.must(tx.Rollback(t.Context()))
	b.want(b.mark(rows), table.Done)
}

// TestRowsThatAreNotVisibleYet: the commit record is flushed, and so decoded,
// before other sessions see its rows; a missing synchronous standby makes that
// moment last.
func TestRowsThatAreNotVisibleYet(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := newBench(t, pg, outbox.MarkUpdate)
		rows := b.insert(1)
		b.must(pg.Reload(t.Context(), map[string]string{"synchronous_standby_names": "nobody"}))
		var committed chan error
		app := b.connect()
		var row table.Row
		// A commit waits only once the checkpointer has taken the setting.
		for waits := false; !waits; {
			var id string
			var hash, xid int64
			tx, err := app.Begin(t.Context())
			b.must(err)
			b.must(tx.QueryRow(t.Context(), fmt.Sprintf(`INSERT INTO outbox_messages AS t (aggregate_type, aggregate_id, event_type, payload)
				VALUES ('order', 1, 'x', '{}') RETURNING id::text, %s, pg_current_xact_id()::xid::text::bigint`, b.table.HashSQL("t"))).Scan(&id, &hash, &xid))
			row = table.Row{Ref: outbox.Ref{Table: b.table, ID: id, Hash: uint64(hash)}, XID: uint32(xid)}
			ended := make(chan error, 1)
			go func() { ended <- tx.Commit(context.Background()) }()
			for done := false; !done && !waits; time.Sleep(10 * time.Millisecond) {
				select {
				case err := <-ended:
					b.must(err)
					done = true
				default:
					waits = b.text(`SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`) == "1"
				}
			}
			committed = ended
		}
		b.want(b.mark([]table.Row{rows[0], row}), table.Done, table.Invisible)
		states, err := b.db.LookUp(t.Context(), b.table, []table.Row{row})
		b.must(err)
		if !states[0].Publish() || states[0].Visible {
			t.Errorf("state %+v: a row that is not visible yet is to be published", states[0])
		}
		b.must(pg.Reload(t.Context(), map[string]string{"synchronous_standby_names": ""}))
		b.must(<-committed)
		b.want(b.mark([]table.Row{row}), table.Done)
	})
}

var retry = table.Retry{Backoff: 30 * time.Second, MaxAttempts: 10}

func TestParkRecordsOnce(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(2)
	rows[0].Failure = "subject: holds a space"
	for range 3 {
		v, err := b.db.Park(t.Context(), b.table, rows[:1], retry)
		b.must(err)
		b.want(v, table.Done)
	}
	if s := b.text(`SELECT attempts || ' ' || last_error || ' ' || (available_at > now() + interval '25 seconds') FROM outbox_messages WHERE id = 1`); s != "1 subject: holds a space true" {
		t.Errorf("the row says %q", s)
	}
	states, err := b.db.LookUp(t.Context(), b.table, rows)
	b.must(err)
	if states[0].Publish() || !states[1].Publish() {
		t.Errorf("states %+v: a recorded row is the poller's, an unrecorded one is not", states)
	}
}

func TestParkMakesDeadLettersWhereNothingCanBeRecorded(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkDelete)
	b.exec(`CREATE TABLE outbox (id uuid PRIMARY KEY, aggregatetype varchar(255), aggregateid varchar(255), type varchar(255), payload jsonb, extra text)`)
	b.exec(`INSERT INTO outbox VALUES ('00000000-0000-0000-0000-00000000002a', 'order', 'o-1', 'bad type', '{"a": 1}', 'kept')`)
	box := &outbox.Table{Schema: "public", Name: "outbox", Layout: outbox.Debezium(), Mark: outbox.MarkDelete}
	b.must(b.db.CheckTable(t.Context(), box))
	var hash int64
	b.must(b.app.QueryRow(t.Context(), `SELECT `+box.HashSQL("t")+` FROM outbox t`).Scan(&hash))
	row := table.Row{Ref: outbox.Ref{Table: box, ID: "00000000-0000-0000-0000-00000000002a", Hash: uint64(hash)}, Failure: "subject: holds a space"}
	for range 2 {
		v, err := b.db.Park(t.Context(), box, []table.Row{row}, retry)
		b.must(err)
		b.want(v, table.Done)
	}
	got := b.text(`SELECT string_agg(concat_ws('|', outbox, row_id, event_type, last_error, original ->> 'extra'), ';') FROM outbox_messages_dlq`)
	if want := "public.outbox|00000000-0000-0000-0000-00000000002a|bad type|subject: holds a space|kept"; got != want {
		t.Errorf("dead letters %q, want %q", got, want)
	}
	if n := b.text(`SELECT count(*) FROM outbox`); n != "0" {
		t.Errorf("%s rows are left in the outbox", n)
	}
}

func TestLookUp(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(5)
	b.mark(rows[1:2])
	b.exec(`DELETE FROM outbox_messages WHERE id = 3`)
	b.exec(`UPDATE outbox_messages SET payload = '{}' WHERE id = 4`)
	b.exec(`UPDATE outbox_messages SET last_error = 'held' WHERE id = 5`)
	states, err := b.db.LookUp(t.Context(), b.table, rows)
	b.must(err)
	for i, want := range []bool{true, false, false, false, false} {
		if states[i].Publish() != want {
			t.Errorf("row %d: %+v: Publish() is %t", i+1, states[i], !want)
		}
	}
	if states[1].ProcessedAt.IsZero() || states[0].Visible != true || states[2].Exists || states[3].Same || !states[4].Recorded {
		t.Errorf("states %+v", states)
	}
	var next table.MarkCursor
	marked, err := b.db.MarkedSince(t.Context(), b.table, states[1].ProcessedAt, &next, 10)
	b.must(err)
	if len(marked) != 1 || marked[0].Ref != rows[1].Ref {
		t.Errorf("marked since %v, want row 2", marked)
	}
}

func TestTheLockIsHeldByOne(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	other := b.open()
	for _, c := range []struct {
		db   *table.DB
		want bool
	}{{b.db, true}, {other, false}} {
		if got, err := c.db.TryLock(t.Context()); err != nil || got != c.want {
			t.Fatalf("TryLock: %t, %v, want %t", got, err, c.want)
		}
	}
	b.db.Close()
	// The server lets go of it when the holder's process has ended.
	for deadline := time.Now().Add(testenv.Patience); ; {
		got, err := other.TryLock(t.Context())
		if err != nil || !got && time.Now().After(deadline) {
			t.Fatalf("TryLock after the holder left: %t, %v", got, err)
		}
		if got {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func TestWatchNoticesALostConnection(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	watched := make(chan error, 1)
	pid := b.db.Conn().PgConn().PID()
	go func() { watched <- b.db.Watch(t.Context()) }()
	b.exec(`SELECT pg_terminate_backend($1)`, pid)
	if err := <-watched; pg.Code(err) != "57P01" {
		t.Fatalf("%v, want 57P01", err)
	}
	if b.db.Alive() {
		t.Error("the connection is said to live")
	}
}

func TestCheckTable(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE UNLOGGED TABLE quick (LIKE outbox_messages)`)
	b.exec(`CREATE TABLE bare (id bigint, event_type text, payload jsonb)`)
	b.exec(`CREATE VIEW seen AS SELECT * FROM outbox_messages`)
	b.exec(`CREATE TABLE derived (LIKE outbox_messages);
		ALTER TABLE derived DROP COLUMN trace_id, ADD COLUMN trace_id text GENERATED ALWAYS AS (payload ->> 'trace') STORED`)
	for name, want := range map[string]string{
		"missing":         "does not exist",
		"quick":           "unlogged",
		"bare":            `lacks what layout "canonical" needs: "tenant_id"`,
		"seen":            "is not a table",
		"derived":         `"trace_id" of public.derived is a generated one`,
		"outbox_messages": "",
	} {
		box := &outbox.Table{Schema: "public", Name: name, Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
		err := b.db.CheckTable(t.Context(), box)
		if want == "" {
			b.must(err)
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
		if hint.Of(err) == "" {
			t.Errorf("%s: no hint", name)
		}
	}
}

func TestCheckTableNamesMissingPrivileges(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	role := "relay_" + b.text(`SELECT current_database()`)
	b.exec(`CREATE ROLE ` + role + ` LOGIN`)
	t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP OWNED BY `+role+`; DROP ROLE `+role) })
	cfg := b.config()
	cfg.URL = strings.Replace(cfg.URL, "postgres@", role+"@", 1)
	db, err := table.Open(t.Context(), cfg)
	b.must(err)
	defer db.Close()
	const all = `UPDATE ("processed_at", "attempts", "last_error", "available_at")`
	for _, step := range []struct{ lacks, grant string }{
		{`SELECT, ` + all + `, DELETE`, `SELECT, UPDATE (processed_at) ON outbox_messages`},
		{all + `, DELETE`, `UPDATE (attempts, last_error, available_at) ON outbox_messages`},
		{`DELETE`, `DELETE ON outbox_messages`},
		{`SELECT, INSERT`, `INSERT ON outbox_messages_dlq`},
		{`SELECT`, `SELECT ON outbox_messages_dlq`},
		{`SELECT`, `SELECT ON outbox_known`},
	} {
		if err := db.CheckTable(t.Context(), b.table); !strings.Contains(hint.Of(err), "GRANT "+step.lacks+" ON ") {
			t.Errorf("%v (%s): want that %s is lacking", err, hint.Of(err), step.lacks)
		}
		b.exec(`GRANT ` + step.grant + ` TO ` + role)
	}
	b.must(db.CheckTable(t.Context(), b.table))
	// A column is read without a privilege on its type's schema.
	b.exec(`CREATE SCHEMA types; CREATE TYPE types.kind AS ENUM ('order'); ALTER TABLE outbox_messages ALTER aggregate_type TYPE types.kind USING 'order'`)
	b.must(db.CheckTable(t.Context(), b.table))
}

// TestFetchIsBounded: of rows that turn out to be large it keeps some.
func TestFetchIsBounded(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
		SELECT 'order', 1, 'order.placed', to_jsonb(repeat('x', 1 << 20)) FROM generate_series(1, 20)`)
	db := b.open()
	var ids []string
	for n := range 20 {
		ids = append(ids, strconv.Itoa(n+1))
	}
	for calls := 0; len(ids) > 0; calls++ {
		f, err := db.Fetch(t.Context(), b.table, ids, 2<<20)
		b.must(err)
		if len(f.Rows) == 0 || len(f.Rows) > 8 || len(f.Rows) != f.N || calls > 3 {
			t.Fatalf("call %d: %d rows of %d, %d are dealt with", calls, len(f.Rows), len(ids), f.N)
		}
		if got := string(f.Rows[0].Values[outbox.ID]); got != ids[0] {
			t.Fatalf("it begins with row %s, not %s", got, ids[0])
		}
		ids = ids[f.N:]
	}
}

// TestSlotGauges: a slot that is not there keeps nothing, and cannot be lost.
func TestSlotGauges(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	cfg := b.config()
	cfg.Slot = "gauges"
	db, err := table.Open(t.Context(), cfg)
	b.must(err)
	defer db.Close()
	if g, err := db.Slot(t.Context()); err != nil || g != (pg.SlotGauges{Safe: -1}) {
		t.Errorf("without a slot: %+v, %v", g, err)
	}
	b.exec(`SELECT pg_create_logical_replication_slot('gauges', 'pgoutput')`)
	defer b.exec(`SELECT pg_drop_replication_slot('gauges')`)
	b.insert(100)
	if g, err := db.Slot(t.Context()); err != nil || g.Retained <= 0 || g.ConfirmedLag <= 0 || g.Safe != -1 {
		t.Errorf("with one: %+v, %v", g, err)
	}
}
