package relay_test

import (
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

func TestRowReachesTheStream(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		x := r.start().streaming()
		r.exec(`INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload) VALUES (7, 'order', 42, 'order.created', '{"b": 1, "a": [true, null]}')`)
		eventually(t, "the row is marked", func() bool {
			return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL`) == "0"
		})
		got := r.stored()
		if len(got) != 1 {
			t.Fatalf("stored %d messages, want 1", len(got))
		}
		t.Log(got[0].Subject, got[0].Header, string(got[0].Data))
		x.halt()
		if x.err != nil {
			t.Fatal(x.err)
		}
	})
}
