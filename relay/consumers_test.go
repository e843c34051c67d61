package relay_test

import (
	"slices"
	"testing"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/internal/testenv"
)

// TestNoConsumerAllowed: somebody else's consumer is the only one that the stream, or the account,
// may have. A relay that is started again while rows are stored and not marked reads them back all the same.
func TestNoConsumerAllowed(t *testing.T) {
	t.Parallel()
	for name, limit := range map[string]struct {
		config string
		change func(*jetstream.StreamConfig)
		warned bool // the account's limit shows in no stream
	}{
		"stream": {"", func(c *jetstream.StreamConfig) { c.MaxConsumers = 1 }, true},
		"account": {`accounts { A { jetstream { max_consumers: 1 }, users: [{user: a, password: a}] } }
			no_auth_user: a`, nil, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRigWith(t, testenv.SharedPostgres(t), testenv.NewNATS(t, testenv.NATSOptions{Process: true, Config: limit.config}))
			r.createStream(limit.change)
			x := r.start().streaming()
			r.put(1, 20)
			r.pending(0)
			taker := r.seize(putSQL, "order.placed", 21, 50)
			eventually(t, "the rows are stored and not marked", func() bool { return r.storedCount() == 50 })
			_, err := r.js().CreateConsumer(t.Context(), "EVENTS", jetstream.ConsumerConfig{Durable: "others"})
			r.must(err)
			x.halt()
			x = r.start()
			r.must(run(t.Context(), taker, "COMMIT"))
			x.streaming()
			r.put(51, 60)
			r.pending(0)
			r.passes(r.here())
			x.alarmed("no_consumer")
			warned := slices.ContainsFunc(x.logs.All(), func(e observer.LoggedEntry) bool { return e.ContextMap()["code"] == "stream-max-consumers" })
			if warned != limit.warned {
				t.Errorf("the start warns of the stream's limit: %t, want %t", warned, limit.warned)
			}
			r.must(r.js().DeleteConsumer(t.Context(), "EVENTS", "others"))
			r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'walpost%'`)
			x.over("no_consumer")
			r.storedIs(1, 60)
			x.quiet("events_lost", "missed_rows")
		})
	}
}
