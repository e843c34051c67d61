package relay_test

import (
	"os"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/deadletter"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

// trap sets traps in the rig's database, and has the relay look at them before it looks at pg_catalog.
func (r *rig) trap() {
	r.t.Helper()
	traps := testenv.SetTraps(r.t, r.url)
	r.cfg.PostgresURL = traps.URL()
	r.t.Cleanup(func() { traps.Check(r.t) })
}

// trapped: with WALPOST_TRAPS set every test of this package runs over traps.
var trapped = os.Getenv("WALPOST_TRAPS") != ""

// TestNamesAreTheCatalogs has a role that may create in public plant functions, operators, types and views with the names
// of all that pg_catalog has. The relay streams, polls, parks, holds, buries, retries, archives and starts again, and calls none.
func TestNamesAreTheCatalogs(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode relay.Mode
		mark outbox.Mark
	}{
		"stream":        {relay.ModeStream, outbox.MarkUpdate},
		"stream-delete": {relay.ModeStream, outbox.MarkDelete},
		"poll":          {relay.ModePoll, outbox.MarkUpdate},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.trap()
			r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.>"} })
			r.cfg.Mode, r.cfg.Outboxes[0].Mark = c.mode, c.mark
			r.cfg.Retry, r.cfg.FallbackInterval = table.Retry{Backoff: 10 * time.Millisecond, MaxAttempts: 2}, 200*time.Millisecond
			r.cfg.Retention = relay.Retention{ArchiveAfter: time.Second, DropAfter: time.Hour, Interval: 100 * time.Millisecond}
			const put = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at)
				SELECT 'order', 1, v.kind, pg_catalog.json_build_object('n', v.n)::jsonb, pg_catalog.now() + v.late
				FROM (VALUES ('order.placed', 1, interval '0'), ('payment.made', 2, interval '0'), ('order.placed', 3, interval '0'), ('order.placed', 4, interval '2 seconds')) v(kind, n, late)`
			r.exec(put)
			x := r.start()
			eventually(t, "the row is a dead letter", func() bool { return r.query1(`SELECT count(*) FROM outbox_messages_dlq`) == "1" })
			eventually(t, "all others are stored", func() bool { return r.storedCount() == 3 })
			r.pending(0)
			if c.mark == outbox.MarkUpdate {
				eventually(t, "rows are in the archive", func() bool { return r.query1(`SELECT count(*) FROM outbox_messages_archive`) == "3" })
			}

			r.setSubjects("events.order.>", "events.payment.>")
			dlq, err := deadletter.Open(t.Context(), deadletter.Config{
				Config: table.Config{URL: r.cfg.PostgresURL}, Outboxes: r.cfg.Outboxes,
			})
			r.must(err)
			defer dlq.Close()
			r.must(dlq.Retry(t.Context(), deadletter.Filter{EventType: "payment.made", Class: "uncovered"}, false, func(o deadletter.Outcome) { r.must(o.Err) }))
			eventually(t, "the dead letter is stored", func() bool { return r.storedCount() == 4 })
			r.pending(0)

			x.halt() // the next session reads back and looks up
			r.exec(put)
			x = r.start()
			eventually(t, "all are stored", func() bool { return r.storedCount() == 8 })
			r.pending(0)
			x.halt()
		})
	}
}

// TestAmbiguousOverloads: two functions that do no harm once made every call of concat ambiguous (42725), and so every
// look-up and every mark fail.
func TestAmbiguousOverloads(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.exec(`CREATE FUNCTION public.concat(text) RETURNS text LANGUAGE sql AS 'SELECT $1'`)
	r.exec(`CREATE FUNCTION public.concat(bigint) RETURNS text LANGUAGE sql AS 'SELECT $1::text'`)
	r.exec(putSQL, "order.placed", 1, 1)
	x := r.start().streaming()
	r.exec(putSQL, "order.placed", 2, 2)
	eventually(t, "both are stored", func() bool { return r.storedCount() == 2 })
	eventually(t, "both are marked", func() bool {
		return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == "0"
	})
	x.halt()
}
