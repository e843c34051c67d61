package table_test

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// digits is a document of some bytes whose text has a gigabyte: each number has 131,072 digits.
const digits = `(SELECT jsonb_agg('1e131071'::jsonb) FROM generate_series(1, 8300))`

// TestFetchOmits: a value that is too long as text is not fetched, however small it is
// stored, and its length is known.
func TestFetchOmits(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, last_error) VALUES
		('order', 1, 'short', '{"n": 1}', NULL),
		('order', 2, 'long', to_jsonb(repeat('x', 3 << 20)), NULL),
		('order', 3, 'digits', '[1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071, 1e131071]', NULL),
		('order', 4, repeat('x', 70000), '{}', 'held: ' || repeat('x', 70000)),
		('order', 5, 'fits', to_jsonb(repeat('x', (1 << 20) - 2)), NULL),
		('order', 6, 'gigabyte', ` + digits + `, NULL)`)
	var got []*outbox.Event
	for _, ids := range [][]string{{"1", "2", "3", "4"}, {"5", "6"}} { // to render a gigabyte takes long: twice is enough
		for len(ids) > 0 {
			f, err := b.db.Fetch(t.Context(), b.table, ids, 1<<20)
			b.must(err)
			if got = append(got, f.Rows...); len(f.Rows) == 0 || len(f.Rows) != f.N {
				t.Fatalf("%d rows of %d, %d are dealt with", len(f.Rows), len(ids), f.N)
			}
			ids = ids[f.N:]
		}
	}
	for i, want := range [][]outbox.Omitted{
		nil,
		{{Field: outbox.Payload, Size: 3<<20 + 2}},
		{{Field: outbox.Payload, Size: 9*131072 + 8*2 + 2}},
		{{Field: outbox.EventType, Size: 70000}},
		nil,
		{{Field: outbox.Payload, Size: outbox.MostText}},
	} {
		ev := got[i]
		if string(ev.Values[outbox.ID]) != strconv.Itoa(i+1) || !reflect.DeepEqual(ev.Omitted, want) {
			t.Errorf("row %d: omitted %v, want %v", i+1, ev.Omitted, want)
		}
		if ev.Size() > 1<<20+200 {
			t.Errorf("row %d has %d bytes", i+1, ev.Size())
		}
		if recorded := ev.Values[outbox.LastError] != nil; recorded != (i == 3) {
			t.Errorf("row %d is recorded: %t", i+1, recorded)
		}
		if (ev.Hash() == outbox.UnknownHash) != (want != nil) {
			t.Errorf("row %d has hash %x", i+1, ev.Hash())
		}
	}
}

// omitted is a row whose payload has so many bytes.
func (b *bench) omitted(id string, size int) table.Row {
	return table.Row{Ref: outbox.Ref{Table: b.table, ID: id}, Failure: "size: too large", Polled: true, Omitted: []outbox.Omitted{{Field: outbox.Payload, Size: size}}}
}

// TestKept: a dead row that is too large to be moved stays in its outbox, has a dead
// letter, is not tried again and holds nobody. Whether that is known before, or the server
// meets a limit, is all the same.
func TestKept(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE FUNCTION limits() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'too large' USING ERRCODE = 'program_limit_exceeded'; END $$;
		CREATE TRIGGER limits BEFORE DELETE ON outbox_messages FOR EACH ROW WHEN (OLD.id = 2) EXECUTE FUNCTION limits()`)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES
		('order', 1, 'a', to_jsonb(repeat('x', 17 << 20))), ('order', 2, 'b', '{}'), ('order', 3, 'c', '{}'),
		('order', 4, 'd', (SELECT jsonb_agg(md5(g::text)) FROM generate_series(1, 20) g))`)
	rows := []table.Row{
		b.omitted("1", 17<<20+2),
		{Ref: outbox.Ref{Table: b.table, ID: "2"}, Failure: "subject: none", Polled: true},
		{Ref: outbox.Ref{Table: b.table, ID: "3"}, Failure: "subject: none", Polled: true},
		b.omitted("4", outbox.MostText),
	}
	for range 2 { // the second time there is nothing to do
		verdicts, err := b.db.Park(t.Context(), b.table, rows, table.Retry{Backoff: time.Millisecond})
		b.must(err)
		b.want(verdicts, table.Done, table.Done, table.Done, table.Done)
	}
	got := b.text(`SELECT string_agg(concat_ws('|', id, left(last_error, 22), available_at, attempts), ', ' ORDER BY id) FROM outbox_messages`)
	if want := "1|kept: size: too large|infinity|0, 2|kept: subject: none|infinity|0, 4|kept: size: too large|infinity|0"; got != want {
		t.Errorf("the outbox holds %s, want %s", got, want)
	}
	letters := b.text(`SELECT string_agg(concat_ws('|', row_id, split_part(last_error, ';', 1), event_type, attempts, original ->> 'walpost:omitted'), ', ' ORDER BY row_id) FROM outbox_messages_dlq`)
	if want := `1|size: too large|a|1|["payload"], 2|subject: none|b|1|[], 3|subject: none|c|1, 4|size: too large|d|1|["payload"]`; letters != want {
		t.Errorf("the dead letters are %s, want %s", letters, want)
	}
	recorded, err := b.db.Recorded(t.Context(), b.table, true, 10)
	b.must(err)
	fresh, err := b.db.Fresh(t.Context(), b.table, time.Second, 10)
	b.must(err)
	if len(recorded)+len(fresh) > 0 {
		t.Errorf("to be tried again: %v, %v", recorded, fresh)
	}
	q := b.dlq(b.table)
	done, left := b.retry(q, deadletter.Filter{})
	if len(done) != 1 || len(left) != 3 {
		t.Errorf("retried are %v, left %v", done, left)
	}
	for _, err := range left {
		if !strings.Contains(err.Error(), "does not hold the whole row") {
			t.Error(err)
		}
	}
}

// TestKeptWithoutRecord: a row that takes no record has one dead letter, is not tried again and
// keeps nobody waiting, until it is changed or another row has its id.
func TestKeptWithoutRecord(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	bare := &outbox.Table{Schema: "public", Name: "bare", Layout: outbox.Debezium(), Mark: outbox.MarkDelete}
	b.exec(`CREATE TABLE bare (id bigint PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text);
		INSERT INTO bare VALUES (1, 'order', '1', 'a', repeat('x', 17 << 20)), (2, 'order', '1', 'a', '{}')`)
	b.must(b.db.CheckTable(t.Context(), bare))
	fresh := func(want ...string) {
		t.Helper()
		cs, err := b.db.Fresh(t.Context(), bare, time.Second, 10)
		b.must(err)
		got := []string{}
		for _, c := range cs {
			got = append(got, c.ID)
		}
		if !slices.Equal(got, want) {
			t.Errorf("to be delivered are %v, want %v", got, want)
		}
	}
	row := func() table.Row {
		f, err := b.db.Fetch(t.Context(), bare, []string{"1"}, 1<<20)
		b.must(err)
		r := table.RowOf(f.Rows[0])
		r.Failure, r.Polled = "size: too large", true
		return r
	}()
	fresh("1", "2")
	for range 2 {
		verdicts, err := b.db.Park(t.Context(), bare, []table.Row{row}, table.Retry{MaxAttempts: 10})
		b.must(err)
		b.want(verdicts, table.Done)
	}
	fresh("2")
	if got := b.text(`SELECT concat(count(*), '|', min(row_id), '|', min(original ->> 'walpost:omitted')) FROM outbox_messages_dlq`); got != `1|1|["payload"]` {
		t.Errorf("the dead letters are %s", got)
	}
	backlog := &table.Backlog{Table: bare, Threshold: time.Second}
	left, err := backlog.Left(t.Context(), b.db)
	b.must(err)
	if left != "row 2" {
		t.Errorf("a slot that is made waits for %q, want row 2", left)
	}
	b.exec(`DELETE FROM ` + bare.SQL() + ` WHERE id = 2`)
	left, err = backlog.Left(t.Context(), b.db)
	b.must(err)
	if left != "" {
		t.Errorf("a slot that is made waits for %s", left)
	}
	b.exec(`UPDATE ` + bare.SQL() + ` SET payload = '{}' WHERE id = 1`)
	fresh("1")
}

// TestDeadLetterOfALongID: an id that a key takes becomes a dead letter.
func TestDeadLetterOfALongID(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	long := &outbox.Table{Schema: "public", Name: "long", Layout: outbox.Debezium(), Mark: outbox.MarkDelete}
	b.exec(`CREATE TABLE long (id text PRIMARY KEY, aggregatetype text, aggregateid text, type text, payload text);
		INSERT INTO long SELECT left(string_agg(md5(n::text), ''), 2690), 'order', '1', 'order cursed', '{}' FROM generate_series(1, 100) n`)
	b.must(b.db.CheckTable(t.Context(), long))
	f, err := b.db.Fetch(t.Context(), long, []string{b.text(`SELECT id FROM long`)}, 1<<20)
	b.must(err)
	row := table.RowOf(f.Rows[0])
	row.Failure = "subject: holds a space"
	verdicts, err := b.db.Park(t.Context(), long, []table.Row{row}, table.Retry{MaxAttempts: 10})
	b.must(err)
	b.want(verdicts, table.Done)
	if got := b.text(`SELECT concat((SELECT count(*) FROM long), '|', count(*), '|', min(length(row_id))) FROM outbox_messages_dlq`); got != "0|1|2690" {
		t.Errorf("rows, dead letters and the length of their id: %s, want 0|1|2690", got)
	}
	done, left := b.retry(b.dlq(long), deadletter.Filter{})
	if len(done) != 1 || len(left) != 0 || b.text(`SELECT count(*) FROM long`) != "1" {
		t.Errorf("retried are %v, left %v", done, left)
	}
}

// TestOmittedIsNotTheID: a row that has got the id of one whose content is not known is left alone.
func TestOmittedIsNotTheID(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'a', '{}')`)
	for _, attempts := range []int{0, 10} { // to be parked, to be a dead letter
		for _, size := range []int{2 << 20, 17 << 20, outbox.MostText} {
			verdicts, err := b.db.Park(t.Context(), b.table, []table.Row{b.omitted("1", size)}, table.Retry{MaxAttempts: 10 - attempts})
			b.must(err)
			b.want(verdicts, table.Done)
		}
	}
	if got := b.text(`SELECT concat((SELECT count(*) FROM outbox_messages WHERE last_error IS NULL), '|', (SELECT count(*) FROM outbox_messages_dlq))`); got != "1|0" {
		t.Errorf("rows without a record and dead letters: %s, want 1|0", got)
	}
}

// TestAnOutageKeepsNoRow: a row that the server has no time for is neither too long nor too large to be
// moved, unless it is.
func TestAnOutageKeepsNoRow(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`ALTER TABLE outbox_messages ADD extra text;
		INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, extra) VALUES
			('order', 1, 'a', (SELECT jsonb_agg('1e131071'::jsonb) FROM generate_series(1, 40)), NULL), ('order', 2, 'a', '{}', repeat('x', 17 << 20));
		CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(10); RETURN OLD; END $$;
		CREATE TRIGGER slow BEFORE DELETE ON outbox_messages FOR EACH ROW EXECUTE FUNCTION slow()`)
	f, err := b.db.Fetch(t.Context(), b.table, []string{"1", "2"}, 64<<20)
	b.must(err)
	limit := func(ms int) {
		b.must(b.db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, fmt.Sprintf(`SET statement_timeout = %d`, ms))
			return err
		}))
	}
	limit(2)
	if f, err := b.db.Fetch(t.Context(), b.table, []string{"1"}, 1<<20); !table.TooLong(err) {
		t.Errorf("without time are fetched %v, %v", f.Rows, err)
	}
	limit(2000)
	for i, want := range []string{"", "kept: subject: none"} {
		row := table.RowOf(f.Rows[i])
		row.Failure, row.Polled = "subject: none", true
		if _, err := b.db.Park(t.Context(), b.table, []table.Row{row}, table.Retry{}); table.TooLong(err) != (want == "") {
			t.Errorf("row %d is a dead letter: %v", i+1, err)
		}
		if got := b.text(fmt.Sprintf(`SELECT coalesce(last_error, '') FROM outbox_messages WHERE id = %d`, i+1)); got != want {
			t.Errorf("row %d says %q, want %q", i+1, got, want)
		}
	}
}

// TestCastsOfATypesOwner: no cast is called that the owner of a column's type, or of the table's, has defined.
func TestCastsOfATypesOwner(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`CREATE TYPE doc AS (body text);
		CREATE TABLE box (id bigint PRIMARY KEY, event_type text, payload doc, extra doc);
		INSERT INTO box SELECT n, 'a', ROW(repeat('x', 100 * n))::doc, ROW('y')::doc FROM generate_series(1, 2) n`)
	for i, cast := range [][2]string{
		{"doc", "json"},
		{"doc", "jsonb"},
		{"box", "text"},
		{"box", "json"},
		{"box", "jsonb"},
		{"text", "doc"},
		{"json", "doc"},
		{"text", "box"},
		{"json", "box"},
	} {
		b.exec(fmt.Sprintf(`CREATE FUNCTION called%d(%s) RETURNS %s LANGUAGE plpgsql AS $$ BEGIN RAISE 'a cast is called'; END $$;
			CREATE CAST (%[2]s AS %[3]s) WITH FUNCTION called%[1]d(%[2]s) AS IMPLICIT`, i, cast[0], cast[1]))
	}
	// The planner calls this one where a statement names it, also in a branch that is never taken.
	b.exec(`CREATE FUNCTION trap() RETURNS text IMMUTABLE LANGUAGE plpgsql AS $$ BEGIN RAISE 'a cast is planned'; END $$;
		CREATE FUNCTION planned(doc) RETURNS text IMMUTABLE LANGUAGE sql AS 'SELECT public.trap()';
		CREATE CAST (doc AS text) WITH FUNCTION planned(doc) AS IMPLICIT`)
	layout, err := outbox.CustomLayout(map[string]string{"id": "id", "event_type": "event_type", "payload": "payload"})
	b.must(err)
	box := &outbox.Table{Schema: "public", Name: "box", Layout: layout, Mark: outbox.MarkDelete}
	b.must(b.db.CheckTable(t.Context(), box))
	cs, err := b.db.Fresh(t.Context(), box, time.Second, 10)
	if err != nil || len(cs) != 2 {
		t.Errorf("pending are %v, %v", cs, err)
	}
	f, err := b.db.Fetch(t.Context(), box, []string{"1", "2"}, 150)
	b.must(err)
	for _, ev := range f.Rows {
		row := table.RowOf(ev)
		row.Failure, row.Polled = "size: too large", true
		_, err := b.db.Park(t.Context(), box, []table.Row{row}, table.Retry{})
		b.must(err)
	}
	if got := b.text(`SELECT concat(count(*), '|', min(original ->> 'payload') FILTER (WHERE row_id = '1')) FROM outbox_messages_dlq`); got != "2|("+strings.Repeat("x", 100)+")" {
		t.Errorf("the dead letters are %s", got)
	}
	if done, left := b.retry(b.dlq(box), deadletter.Filter{}); len(done) != 2 {
		t.Errorf("retried are %v, left %v", done, left)
	}
	if got := b.text(`SELECT string_agg(concat_ws('|', id, length((payload).body), (extra).body), ' ' ORDER BY id) FROM box`); got != "1|100|y 2|200|y" {
		t.Errorf("the rows are %s", got)
	}
}
