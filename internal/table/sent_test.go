package table_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestBegun: which rows of outbox_sent are of the rows that a relay delivers.
func TestBegun(t *testing.T) {
	now := time.Now()
	sent := func(shard, where, stream string) table.Sent {
		return table.Sent{Outbox: "public.o", Source: "s", Shard: shard, Condition: where, Stream: stream, BegunAt: &now}
	}
	for _, x := range []struct {
		name  string
		known []table.Sent
		is    table.Sent
		want  table.Begun
	}{
		{"nothing is known", nil, sent("", "", "E"), table.NotKnown},
		{"the same", []table.Sent{sent("", "", "E")}, sent("", "", "E"), table.WasBegun},
		{"another outbox", []table.Sent{{Outbox: "public.x", BegunAt: &now}}, sent("", "", "E"), table.NotKnown},
		{"another stream", []table.Sent{sent("", "", "E")}, sent("", "", "F"), table.WasBegun},
		{"another source", []table.Sent{{Outbox: "public.o", Source: "x", Stream: "E", BegunAt: &now}}, sent("", "", "E"), table.WasBegun},
		{"another shard", []table.Sent{sent("1/4", "", "E")}, sent("2/4", "", "E"), table.NotKnown},
		{"more shards", []table.Sent{sent("1/2", "", "E")}, sent("3/4", "", "E"), table.WasBegun},
		{"more shards, another half", []table.Sent{sent("1/2", "", "E")}, sent("2/4", "", "E"), table.NotKnown},
		{"numbers of shards without a common divisor", []table.Sent{sent("1/2", "", "E")}, sent("2/3", "", "E"), table.WasBegun},
		{"no shards any more", []table.Sent{sent("1/2", "", "E")}, sent("", "", "E"), table.WasBegun},
		{"another where", []table.Sent{sent("", "a", "E")}, sent("", "b", "F"), table.MaybeBegun},
		{"no where any more", []table.Sent{sent("", "a", "E")}, sent("", "", "E"), table.WasBegun},
		{"a where", []table.Sent{sent("", "", "E")}, sent("", "a", "E"), table.WasBegun},
		{"another where, and the same elsewhere", []table.Sent{sent("", "b", "E"), sent("", "a", "F")}, sent("", "b", "F"), table.WasBegun},
		{"renewed", []table.Sent{{Outbox: "public.o", Source: "s", Stream: "E"}, sent("", "", "F")}, sent("", "", "E"), table.NotBegun},
		{"renewed, and a stream that is not", []table.Sent{{Outbox: "public.o", Source: "s", Stream: "E"}, sent("", "", "F")}, sent("", "", "F"), table.WasBegun},
	} {
		if got := x.is.BegunIn(x.known); got != x.want {
			t.Errorf("%s: %d, want %d", x.name, got, x.want)
		}
	}
}

// TestSentIsNotedOnce: a first start is kept when the slot changes, and the table refuses TRUNCATE.
func TestSentIsNotedOnce(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	s := table.Sent{Outbox: "o", Source: "s", Stream: "E", Slot: "a", Initial: "none"}
	is := func(what, want string) {
		t.Helper()
		b.is(what, b.text(`SELECT string_agg(concat_ws(' ', slot, initial, begun_at IS NULL), ', ' ORDER BY id) FROM outbox_sent`), want)
	}
	b.must(b.db.NoteSent(t.Context(), s, true))
	at := b.text(`SELECT begun_at FROM outbox_sent`)
	s.Slot, s.Initial = "b", "pending"
	b.must(b.db.NoteSent(t.Context(), s, true))
	is("another slot", "b none f")
	b.is("the first start", b.text(`SELECT begun_at FROM outbox_sent`), at)
	b.must(b.db.NoteSent(t.Context(), s, false))
	is("renewed", "b pending t")
	s.Shard = "1/2"
	b.must(b.db.NoteSent(t.Context(), s, true))
	is("a shard", "b pending t, b pending f")
	for _, held := range []bool{false, true} {
		used, err := b.db.SlotInUse(t.Context(), s)
		b.must(err)
		if used != held {
			t.Errorf("slot b is in use: %t, want %t", used, held)
		}
		_, err = b.app.Exec(t.Context(), `SELECT pg_advisory_lock(hashtextextended('walpost/b', 0))`)
		b.must(err)
	}
	_, err := b.app.Exec(t.Context(), `TRUNCATE outbox_sent`)
	if pg.Code(err) != pgerrcode.ObjectNotInPrerequisiteState {
		t.Errorf("TRUNCATE: %v", err)
	}
}

// TestSentOfAnApplication: a table of that name that is none of walpost's is not read, and asks for no privileges.
func TestSentOfAnApplication(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	b.exec(`DROP TABLE outbox_sent; CREATE TABLE outbox_sent (message_id text, sent_at timestamptz)`)
	if _, exists, err := b.db.Sent(t.Context(), table.SentPrivileges); exists || err != nil {
		t.Errorf("exists: %t, %v", exists, err)
	}
}

// TestNoteLast: notes stay in their page, end with their relay, and another delivery's end with the next relay that begins,
// if no relay delivers it. One that waits holds the lock of its slot.
func TestNoteLast(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	var all []table.Sent
	for _, stream := range []string{"E", "F", "G"} {
		b.must(b.db.NoteSent(t.Context(), table.Sent{Outbox: "o", Source: "s", Stream: stream, Slot: "slot_" + stream, Initial: "pending"}, true))
	}
	all, _, err := b.db.Sent(t.Context(), table.SentPrivileges)
	b.must(err)
	created := time.Now().Truncate(time.Microsecond)
	b.must(b.db.NoteRead(t.Context(), all, table.Noted{StreamCreated: &created, ReadSequence: 5, ReadMessage: "s/o/1/00"}, all))
	for i := range uint64(500) {
		b.must(b.db.NoteLast(t.Context(), all, 5+i, false))
	}
	b.is("pages of table and key", b.text(`SELECT pg_relation_size('outbox_sent') / 8192 || ' ' || pg_relation_size('outbox_sent_pkey') / 8192`), "1 2")
	_, err = b.app.Exec(t.Context(), `SELECT pg_advisory_lock(hashtextextended('walpost/slot_G', 0))`)
	b.must(err)
	other := b.open()
	found, err := other.Deliver(t.Context(), all[1:2])
	b.must(err)
	if found != nil {
		t.Errorf("%v delivers", found)
	}
	b.must(b.db.EndOthers(t.Context(), all[:1]))
	ended := `SELECT string_agg(stream || ' ' || (ended_at IS NOT NULL), ', ' ORDER BY id) FROM outbox_sent`
	b.is("ended", b.text(ended), "E false, F false, G true")
	b.must(b.db.NoteLast(t.Context(), all[:1], 7, true))
	b.is("ended by itself", b.text(ended), "E true, F false, G true")
	first := func() table.Noted {
		t.Helper()
		all, _, err = b.db.Sent(t.Context(), table.SentPrivileges)
		b.must(err)
		return all[0].Noted
	}
	if n := first(); n.ReadSequence != 5 || n.ReadMessage != "s/o/1/00" || n.ReadAt == nil || n.LastSequence != 7 ||
		!n.StreamCreated.Equal(created) || !n.NotedAt.Equal(*n.EndedAt) {
		t.Errorf("noted %+v", n)
	}
	// The clock goes back: it does not tell any more when rows were marked.
	ahead := time.Now().Add(time.Hour).Truncate(time.Microsecond)
	b.exec(`UPDATE outbox_sent SET noted_at = '` + ahead.Format(time.RFC3339Nano) + `'`)
	b.must(b.db.NoteRead(t.Context(), all, table.Noted{StreamCreated: &created}, all))
	if n := first(); n.ReadAt == nil || !n.NotedAt.Equal(ahead) {
		t.Errorf("noted %+v", n)
	}
	b.must(b.db.NoteLast(t.Context(), all[:1], 7, true))
	b.must(b.db.EndOthers(t.Context(), all[1:2]))
	if n := first(); n.ReadAt != nil || n.EndedAt != nil || !n.NotedAt.Equal(ahead) {
		t.Errorf("noted %+v", n)
	}
}

// TestDeliveredTimes: sessions that follow each other are one unless another delivery has begun between them, and nothing is left
// open when that begins.
func TestDeliveredTimes(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	for _, stream := range []string{"E", "F"} {
		b.must(b.db.NoteSent(t.Context(), table.Sent{Outbox: "o", Source: "s", Stream: stream, Slot: stream, Initial: "pending"}, true))
	}
	all, _, err := b.db.Sent(t.Context(), table.SentPrivileges)
	b.must(err)
	created := time.Now()
	begin := func(of []table.Sent) {
		t.Helper()
		b.must(b.db.EndOthers(t.Context(), of))
		b.must(b.db.NoteRead(t.Context(), of, table.Noted{StreamCreated: &created}, nil))
	}
	is := func(what, want string) {
		t.Helper()
		b.is(what, b.text(`SELECT string_agg(concat(stream, (SELECT count(*) FROM unnest(delivered)), CASE WHEN upper_inf(delivered) THEN '+' END),
			' ' ORDER BY id) FROM outbox_sent`), want)
	}
	e, f := all[:1], all[1:]
	for range 5 {
		begin(e)
		begin(e) // again when it has marked what it has read back, or after a crash
		b.must(b.db.NoteLast(t.Context(), e, 1, false))
		is("it runs", "E1+ F0")
		b.must(b.db.NoteLast(t.Context(), e, 1, true))
		is("it has ended", "E1 F0")
	}
	begin(f)
	is("another begins", "E1 F1+")
	begin(e)
	is("the other had crashed", "E2+ F1")
	b.must(b.db.NoteLast(t.Context(), e, 2, true))
	begin(e)
	is("it goes on", "E2+ F1")
	b.exec(`UPDATE outbox_sent SET noted_at = now() + interval '1 hour'`)
	begin(f)
	b.must(b.db.NoteLast(t.Context(), f, 2, true))
	is("the clock has gone back", "E2 F2")
	begin(e)
	is("the clock has gone back, and it goes on", "E2+ F2")
	if apart := b.text(`SELECT count(*) FROM outbox_sent e, outbox_sent f, unnest(f.delivered) d
		WHERE e.stream = 'E' AND f.stream = 'F' AND e.delivered && d`); apart != "1" {
		t.Errorf("%s of F's times are E's too, want the one whose end is not known", apart)
	}
}

// TestAsMarks: a time becomes what a mark of that time is, whatever the column's type and the session's zone.
func TestAsMarks(t *testing.T) {
	for typ, want := range map[string]string{
		"timestamptz":    "2026-11-28 10:00:00.6 2026-11-28 10:00:00.4",
		"timestamptz(0)": "2026-11-28 10:00:01 2026-11-28 10:00:00",
		"timestamp":      "2026-11-28 11:00:00.6 2026-11-28 11:00:00.4",
		"timestamp(0)":   "2026-11-28 11:00:01 2026-11-28 11:00:00",
	} {
		t.Run(typ, func(t *testing.T) {
			b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
			b.exec(`ALTER TABLE outbox_messages ALTER COLUMN processed_at TYPE ` + typ)
			b.must(b.db.Use(t.Context(), func(ctx context.Context, conn *pgx.Conn) error {
				_, err := conn.Exec(ctx, `SET timezone = 'Etc/GMT-1'`)
				return err
			}))
			at := time.Date(2026, 11, 28, 10, 0, 0, 600_000_000, time.UTC)
			marks, err := b.db.AsMarks(t.Context(), b.table, []time.Time{at.In(time.FixedZone("", -18000)), at.Add(-200 * time.Millisecond)})
			b.must(err)
			const layout = "2006-01-02 15:04:05.999999"
			if got := marks[0].UTC().Format(layout) + " " + marks[1].UTC().Format(layout); got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
}
