package relay_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

const knownRowSQL = `INSERT INTO outbox_messages (id, aggregate_type, aggregate_id, event_type, payload, occurred_at)
	OVERRIDING SYSTEM VALUE VALUES (%[1]d, 'order', 1, 'order.placed', '{"n": %[1]d}', '2026-01-01Z')`

// forge publishes a message with the id that the relay would give to a row, and another payload.
func (r *rig) forge(source string, row, n int) {
	r.t.Helper()
	c := r.conn()
	tx, err := c.Begin(r.t.Context())
	r.must(err)
	_, err = tx.Exec(r.t.Context(), fmt.Sprintf(knownRowSQL, row))
	r.must(err)
	ref := outbox.Ref{Table: r.cfg.Outboxes[0], ID: fmt.Sprint(row)}
	var hash int64
	r.must(tx.QueryRow(r.t.Context(), `SELECT `+ref.Table.HashSQL("t")+` FROM outbox_messages t WHERE id = $1`, row).Scan(&hash))
	ref.Hash = uint64(hash)
	r.must(tx.Rollback(r.t.Context()))
	m := nats.NewMsg("events.order.placed")
	m.Header.Set(nats.MsgIdHdr, ref.MessageID(source))
	m.Data = fmt.Appendf(nil, `{"n": %d}`, n)
	_, err = r.js().PublishMsg(r.t.Context(), m)
	r.must(err)
}

// TestForgedMessageIsNoProof: a message that another writer has published under a row's id marks nothing. The
// row is delivered, whether the relay was down meanwhile or JetStream calls its own message a duplicate.
func TestForgedMessageIsNoProof(t *testing.T) {
	t.Parallel()
	for _, format := range []publish.Format{publish.FormatBinary, publish.FormatCloudEvents} {
		for _, down := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/down=%v", format, down), func(t *testing.T) {
				t.Parallel()
				r := newRig(t, testenv.SharedPostgres(t))
				r.cfg.Source, r.cfg.Format, r.cfg.Stream.Shared = "shop", format, !down
				if !down {
					r.cfg.Stream.Batching = jetstream.BatchSingle // a shared stream takes no other
				}
				r.cfg.Retry = table.Retry{Backoff: 100 * time.Millisecond, MaxAttempts: 100}
				r.cfg.FallbackInterval = 200 * time.Millisecond
				r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = 3 * time.Second })
				x := r.start().streaming()
				if down {
					x.halt()
				}
				r.forge("shop", 1000, 7)
				r.exec(fmt.Sprintf(knownRowSQL, 1000))
				if down {
					x = r.start()
				}
				x.alarmed("forged_message")
				eventually(t, "the row is delivered and marked", func() bool {
					return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`) == "1"
				})
				if n := r.storedCount(); n != 2 {
					t.Errorf("the stream has %d messages, want the forged one and the row's", n)
				}
				x.halt()
			})
		}
	}
}

// TestForgedMessageOfAnInvisibleRow: JetStream calls the message of a row a duplicate before the table shows the row.
func TestForgedMessageOfAnInvisibleRow(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		r.cfg.Source, r.cfg.Stream.Shared, r.cfg.Stream.Batching = "shop", true, jetstream.BatchSingle
		r.cfg.Retry = table.Retry{Backoff: 100 * time.Millisecond, MaxAttempts: 100}
		r.cfg.FallbackInterval = 200 * time.Millisecond
		r.createStream(func(c *natsjs.StreamConfig) { c.Duplicates = 3 * time.Second })
		x := r.start().streaming()
		c := r.conn()
		r.forge("shop", 1000, 7)
		r.synchronous("nosuch")
		committed := make(chan error, 1)
		go func() { committed <- run(t.Context(), c, fmt.Sprintf(knownRowSQL, 1000)) }()
		eventually(t, "the payloads are compared", func() bool {
			return r.query1(`SELECT count(*) FROM pg_stat_activity
				WHERE application_name = 'walpost' AND query LIKE '%ORDINALITY AS w(id, hash, ord)%'`) != "0"
		})
		r.synchronous("")
		r.must(<-committed)
		x.alarmed("forged_message")
		eventually(t, "the row is delivered and marked", func() bool {
			return r.query1(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL`) == "1"
		})
		if n := r.storedCount(); n != 2 {
			t.Errorf("the stream has %d messages, want the forged one and the row's", n)
		}
		x.halt()
	})
}
