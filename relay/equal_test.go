package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestEqualAggregatesWait: aggregates whose ids are equal but have different texts are held after a restart, too. No
// event passes a row of its own aggregate that is parked.
func TestEqualAggregatesWait(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	layout, err := outbox.CustomLayout(map[string]string{
		"id": "id", "aggregate_id": "aggregate", "event_type": "type", "payload": "payload",
		"processed_at": "processed_at", "attempts": "attempts", "last_error": "last_error", "available_at": "available_at",
	})
	r.must(err)
	r.cfg.Outboxes = []*outbox.Table{{Schema: "public", Name: "box", Layout: layout, Mark: outbox.MarkUpdate}}
	r.exec(`CREATE TABLE box (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, aggregate numeric, type text, payload jsonb,
		processed_at timestamptz, attempts smallint, last_error text, available_at timestamptz)`)
	put := func(n int, aggregate, eventType string) {
		r.exec(`INSERT INTO box (aggregate, type, payload) VALUES ($1::text::numeric, $2, jsonb_build_object('n', $3::int))`, aggregate, eventType, n)
	}
	recorded := func(n string) {
		t.Helper()
		eventually(t, n+" rows are recorded", func() bool {
			return r.query1(`SELECT count(*) FROM box WHERE last_error IS NOT NULL`) == n
		})
	}
	x := r.start().streaming()
	put(1, "1", "order placed")
	put(2, "1.000", "order placed")
	recorded("2")
	x.halt()
	x = r.start().streaming()
	put(3, "1", "order.placed")
	put(4, "1.000", "order.placed")
	put(5, "2", "order.placed")
	eventually(t, "the other aggregate's row is stored", func() bool { return r.storedCount() > 0 })
	r.storedIs(5, 5)
	recorded("4")
	x.halt()
}
