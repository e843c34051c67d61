package relay_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/verify"
)

// TestKeysOfOtherTypes: canonical tables whose ids, tenants and aggregates are UUIDs or texts have dead
// letters, an archive and repairs as others have.
func TestKeysOfOtherTypes(t *testing.T) {
	t.Parallel()
	for keys, value := range map[string]string{
		"uuid": "('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid",
		"text": "'key / ' || lpad(n::text, 6, '0')",
	} {
		t.Run(keys, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			for _, name := range []string{"outbox_messages", "outbox_messages_archive"} {
				for _, column := range []string{"id", "tenant_id", "aggregate_id"} {
					if name == "outbox_messages" {
						r.exec(fmt.Sprintf(`ALTER TABLE %s ALTER COLUMN %s DROP IDENTITY IF EXISTS, ALTER COLUMN %[2]s DROP DEFAULT`, name, column))
					}
					r.exec(fmt.Sprintf(`ALTER TABLE %s ALTER COLUMN %s TYPE %s USING NULL::%[3]s`, name, column, keys))
				}
			}
			r.createStream(func(c *jetstream.StreamConfig) {
				c.Subjects, c.Duplicates = []string{"events.order.>"}, 100*time.Millisecond
			})
			r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 1}
			put := func(kind string, from, to int) {
				r.exec(fmt.Sprintf(`INSERT INTO outbox_messages (id, tenant_id, aggregate_type, aggregate_id, event_type, payload)
					SELECT %s, %s, 'order', %[2]s, $1, jsonb_build_object('n', n) FROM generate_series($2::int, $3::int) n`, value,
					map[string]string{"uuid": "'11111111-1111-1111-1111-111111111111'::uuid", "text": "'one'"}[keys]), kind, from, to)
			}
			x := r.start().streaming()
			put("order.placed", 1, 20)
			put("payment.made", 21, 21)
			eventually(t, "the row is a dead letter", func() bool { return r.count(`SELECT count(*) FROM outbox_messages_dlq`) == 1 })
			put("order.placed", 22, 30)
			r.pending(0)
			r.listenToAll()
			r.retryAll()
			eventually(t, "the retried row is marked", func() bool { return r.unmarked() == 0 })
			r.archive(10)
			x.halt()
			r.loseMessages(5, 25)
			report := r.verify(repair)
			r.finds(report, map[verify.Kind]int64{verify.Missing: 2})
			if report.Repaired != 2 {
				t.Errorf("%d rows were repaired, want 2: %v", report.Repaired, report.Notes)
			}
			x = r.start().streaming()
			eventually(t, "the repaired rows are marked", func() bool { return r.unmarked() == 0 })
			r.finds(r.verify(), nil)
			x.halt()
		})
	}
}
