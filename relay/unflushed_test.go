package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// TestPolledRowsOutliveACrash: a transaction with synchronous_commit = off is
// visible long before it is flushed. No event may be stored of a row that a crash
// of the server can still take back.
func TestPolledRowsOutliveACrash(t *testing.T) {
	t.Parallel()
	for mark, on := range map[outbox.Mark]string{outbox.MarkUpdate: "UPDATE ON public.outbox_messages", outbox.MarkJournal: "INSERT ON public.outbox_journal"} {
		t.Run(string(mark), func(t *testing.T) {
			t.Parallel()
			pg := testenv.NewPostgres(t, testenv.PGOptions{Settings: map[string]string{"wal_writer_delay": "10s"}})
			r := newRig(t, pg)
			r.markWith(mark)
			r.cfg.Mode = relay.ModePoll
			r.exec(`CREATE FUNCTION linger() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(60); RETURN new; END';
				CREATE TRIGGER linger BEFORE ` + on + ` FOR EACH ROW EXECUTE FUNCTION linger()`) // a mark would flush
			r.start()
			r.exec(`SELECT set_config('synchronous_commit', 'off', true);
				INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', 1, 'order.placed', '{"n": 1}')`)
			eventually(t, "the row is stored", func() bool { return r.storedCount() == 1 })
			r.must(pg.Stop(t.Context(), testenv.Immediate))
			r.must(pg.Start(t.Context()))
			r.disconnect()
			if rows := r.query1(`SELECT count(*) FROM outbox_messages`); rows != "1" {
				t.Errorf("an event is stored, and %s rows are there after the crash", rows)
			}
		})
	}
}
