package table_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestDeliver: one relay at a time delivers a row, and holds each lock once, however often it asks. One that waits shows for whom,
// and begins when that one's connection has ended.
func TestDeliver(t *testing.T) {
	b := newBench(t, testenv.SharedPostgres(t), outbox.MarkUpdate)
	sent := func(name, stream, slot string) table.Sent {
		return table.Sent{Outbox: name, Source: "s", Stream: stream, Slot: slot, Initial: "pending"}
	}
	here := []table.Sent{sent("o", "E", "a"), sent("p", "E", "a")}
	there := []table.Sent{sent("p", "F", "b"), sent("q", "F", "b")}
	const locks = `SELECT count(*) FILTER (WHERE mode = 'ExclusiveLock') || ' ' || count(*) FILTER (WHERE mode = 'ShareLock') FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`
	held := func(what, want string) {
		t.Helper()
		b.is(what, b.text(locks), want)
	}
	first, second := b.open(), b.open()
	deliver := func(db *table.DB, own []table.Sent, want string) {
		t.Helper()
		other, err := db.Deliver(t.Context(), own)
		b.must(err)
		got := "none"
		if other != nil {
			got = fmt.Sprint(other.Outbox, " ", other.Slot, " ", other.PID == first.Conn().PgConn().PID())
		}
		b.is("the other relay", got, want)
	}
	awaited := func(db *table.DB, want *table.DB) {
		t.Helper()
		pid, err := db.Awaiting(t.Context())
		b.must(err)
		if is := want != nil && pid == want.Conn().PgConn().PID(); is != (want != nil) || want == nil && pid != 0 {
			t.Errorf("process %d waits", pid)
		}
	}

	b.must(b.db.NoteSent(t.Context(), here[0], true))
	deliver(first, here, "none")
	held("one outbox is not noted", "0 0")
	b.must(b.db.NoteSent(t.Context(), here[1], true))
	for range 2 {
		deliver(first, here, "none")
		held("the first delivers", "2 0")
	}
	awaited(first, nil)
	for range 2 {
		deliver(second, there, "p a true") // not noted yet
		held("the second waits", "2 1")
	}
	awaited(first, second)
	awaited(second, nil)
	other, err := b.db.Deliverer(t.Context(), there, first.Conn().PgConn().PID())
	b.must(err)
	if other != nil {
		t.Errorf("the first relay is another one than itself: %v", other)
	}
	for _, s := range there {
		b.must(b.db.NoteSent(t.Context(), s, true))
	}
	deliver(second, there, "p a true")
	first.Close()
	for deadline := time.Now().Add(testenv.Patience); b.text(locks) != "0 1" && time.Now().Before(deadline); {
	}
	deliver(second, there, "none")
	held("the second delivers", "2 0")
	b.exec(`DROP TABLE outbox_sent`)
	deliver(b.open(), here, "none")
}
