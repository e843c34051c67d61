package table_test

import (
	"context"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// TestIDTypes has rows found and marked by their ids as the WAL writes them.
func TestIDTypes(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	layout, err := outbox.CustomLayout(map[string]string{
		"id": "id", "event_type": "event_type", "payload": "payload", "processed_at": "processed_at",
	})
	b.must(err)
	const id = "1b4e28ba-2fa1-11d2-883f-0016d3cca427"
	for typ, ids := range map[string][2]string{ // the first one's row is marked, the other's is not
		"char(36)":       {id, strings.Replace(id, "1", "2", 1)},
		"char(40)":       {id + "    ", "1b4e28ba" + strings.Repeat(" ", 32)},
		"varchar(40)":    {id, "1"},
		"uuid":           {id, strings.Replace(id, "1", "2", 1)},
		"numeric(20, 2)": {"12.00", "1.00"},
		"bigint":         {"12", "1"},
	} {
		b.exec(`DROP TABLE IF EXISTS typed`)
		b.exec(`CREATE TABLE typed (id ` + typ + ` PRIMARY KEY, event_type text, payload text, processed_at timestamptz(3))`)
		b.exec(`INSERT INTO typed SELECT id::text::`+typ+`, 'x', 'y' FROM unnest($1::text[]) id`, ids[:])
		box := &outbox.Table{Schema: "public", Name: "typed", Layout: layout, Mark: outbox.MarkUpdate}
		b.must(b.db.CheckTable(t.Context(), box))
		rows := make([]table.Row, len(ids))
		for i, id := range ids {
			ev := outbox.Event{Table: box}
			ev.Values[outbox.ID], ev.Values[outbox.EventType], ev.Values[outbox.Payload] = []byte(id), []byte("x"), []byte("y")
			rows[i].Ref = ev.Ref()
		}
		states, err := b.db.LookUp(t.Context(), box, rows)
		b.must(err)
		for i, s := range states {
			if !s.Exists || !s.Same || !s.Pending || !s.Publish() {
				t.Errorf("%s: %q is not found: %+v", typ, ids[i], s)
			}
		}
		verdicts, err := b.db.Mark(t.Context(), box, rows[:1])
		b.must(err)
		b.want(verdicts, table.Done)
		got := b.text(`SELECT coalesce(string_agg(concat(id), ', '), 'none') FROM typed WHERE processed_at IS NOT NULL`)
		if got != ids[0] {
			t.Errorf("%s: marked is %q, want %q", typ, got, ids[0])
		}
	}
}

// TestLookUpOfAnIDThatCannotBe: it is no row of the table, and the rows around it
// are told as ever.
func TestLookUpOfAnIDThatCannotBe(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(7)
	b.mark(rows[1:2])
	b.exec(`DELETE FROM outbox_messages WHERE id = 4`)
	rows[2].Ref.ID = "abc"
	rows[6].Ref.ID = "99999999999999999999"
	states, err := b.db.LookUp(t.Context(), b.table, rows)
	b.must(err)
	for i, want := range []bool{true, false, false, false, true, true, false} {
		s := states[i]
		if exists := want || i == 1; s.Publish() != want || s.Exists != exists || s.Same != exists || s.Pending != want || !s.Visible {
			t.Errorf("row %d: %+v, want it to exist: %t, to be published: %t", i+1, s, exists, want)
		}
	}
	if states[1].ProcessedAt.IsZero() {
		t.Error("the marked row does not say when it was marked")
	}
	states, err = b.db.LookUp(t.Context(), b.table, rows[2:3])
	b.must(err)
	if want := (table.State{Visible: true}); states[0] != want {
		t.Errorf("state %+v, want %+v", states[0], want)
	}
}

// TestParkWhereAttemptsAreExhausted: the column cannot count on, and no row of
// the batch goes without its record for that.
func TestParkWhereAttemptsAreExhausted(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	rows := b.insert(3)
	b.exec(`UPDATE outbox_messages SET attempts = 32767 WHERE id = 2`)
	for i := range rows {
		rows[i].Failure = "subject: holds a space"
	}
	v, err := b.db.Park(t.Context(), b.table, rows, retry)
	b.must(err)
	b.want(v, table.Done, table.Done, table.Done)
	got := b.text(`SELECT string_agg(concat_ws(' ', id, attempts, last_error, available_at > now()), '; ' ORDER BY id) FROM outbox_messages`)
	if want := "1 1 subject: holds a space t; 2 32767 subject: holds a space t; 3 1 subject: holds a space t"; got != want {
		t.Errorf("the rows say %q, want %q", got, want)
	}
}

// TestServerEncoding: a row's content hash is taken over UTF-8, in the database
// and here.
func TestServerEncoding(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.must(stream.CheckServer(t.Context(), b.app, "walpost"))
	name := b.text(`SELECT current_database()`) + "_latin1"
	b.exec(`CREATE DATABASE ` + name + ` ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'`)
	t.Cleanup(func() { _, _ = b.app.Exec(context.Background(), `DROP DATABASE `+name+` WITH (FORCE)`) })
	u, err := url.Parse(b.url)
	b.must(err)
	u.Path = "/" + name
	c, err := pgx.Connect(t.Context(), u.String())
	b.must(err)
	defer c.Close(context.Background())
	err = stream.CheckServer(t.Context(), c, "walpost")
	if err == nil || !strings.Contains(err.Error(), "encoding is LATIN1, want UTF8") || !strings.Contains(hint.Of(err), "ENCODING 'UTF8'") {
		t.Fatalf("%v (%s), want an error that names both encodings", err, hint.Of(err))
	}
}

// TestRowAtTheEndOfTime: a row that is dated to the last moment that PostgreSQL knows is listed as the others are.
func TestRowAtTheEndOfTime(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.insert(2)
	for _, last := range []string{"294276-12-31 23:59:59.999999+00", "infinity", "4713-01-01 00:00:00+00 BC", "-infinity"} {
		b.exec(`UPDATE outbox_messages SET occurred_at = $1::text::timestamptz WHERE id = 1`, last)
		cs, err := b.db.Fresh(t.Context(), b.table, time.Second, 10)
		if err != nil || len(cs) != 2 {
			t.Errorf("occurred_at %s: %d rows are listed: %v", last, len(cs), err)
		}
	}
}
