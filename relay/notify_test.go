package relay_test

import (
	"bytes"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/relay"
)

const (
	announced    = "inserts are announced: the tables are searched when rows come"
	notAnnounced = "inserts are not announced any more: polling"
)

// announce installs the trigger, or removes it.
func (r *rig) announce(on bool) {
	r.t.Helper()
	cfg, err := pgx.ParseConfig(r.url)
	r.must(err)
	m := migrations.New(cfg, r.cfg.Outboxes)
	defer m.Close()
	if on {
		_, err = m.InstallNotify(r.t.Context())
	} else {
		_, err = m.RemoveNotify(r.t.Context())
	}
	r.must(err)
}

// listened waits until the relay has begun to listen so many times.
func (x *running) listened(times int) {
	x.rig.t.Helper()
	eventually(x.rig.t, "the relay listens", func() bool { return x.logged(announced).Len() == times })
}

// TestNotify: where inserts are announced a relay that polls sends rows at once. Its
// interval is an hour here, so that nothing else can bring them.
func TestNotify(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.announce(true)
		r.cfg.Mode, r.cfg.FallbackInterval = relay.ModePoll, time.Hour
		x := r.start()
		x.listened(1)

		// One row after the other, each timed from its commit to its being read.
		js := r.js()
		s, err := js.Stream(t.Context(), "EVENTS")
		r.must(err)
		consumer, err := s.OrderedConsumer(t.Context(), jetstream.OrderedConsumerConfig{})
		r.must(err)
		messages, err := consumer.Messages()
		r.must(err)
		defer messages.Stop()
		c := r.conn()
		var took timings
		for i := range 100 {
			_, err := c.Exec(t.Context(), putSQL, "order.placed", i+1, i+1)
			r.must(err)
			begun := time.Now()
			_, err = messages.Next(jetstream.NextMaxWait(testenv.Patience))
			r.must(err)
			took.add(time.Since(begun))
			time.Sleep(time.Duration(i%10) * time.Millisecond) // also while the pass before goes on
		}
		t.Logf("commit to consumer, polling on announcement: %s", &took)

		messages.Stop()
		x.halt()

		l := newLedger(r)
		r.exec(`DELETE FROM outbox_messages`)
		r.must(js.DeleteStream(t.Context(), "EVENTS"))
		x = r.start()
		x.listened(1)
		stop := l.start(load{writers: 4, rows: 50, pause: 10 * time.Millisecond})
		eventually(t, "3000 events are stored", func() bool { return r.storedCount() > 3000 })
		stop()
		l.delivered()
	})
}

// TestNotifyIsNotAll: rows that nobody announces, or nobody hears of, arrive too. The
// interval is an hour again.
func TestNotifyIsNotAll(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		r.put(1, 10) // before anybody listens
		r.cfg.Mode, r.cfg.FallbackInterval = relay.ModePoll, time.Hour
		r.cfg.Retry = table.Retry{Backoff: 50 * time.Millisecond, MaxAttempts: 2}
		x := r.start()
		r.pending(0)
		r.announce(true) // while the relay polls
		x.listened(1)
		r.put(11, 20)
		r.pending(0)

		// The trigger goes.
		r.announce(false)
		begun := time.Now()
		r.put(21, 30)
		r.pending(0)
		t.Logf("without the trigger, rows arrive after %s", time.Since(begun).Round(time.Millisecond))
		eventually(t, "it is said that the trigger has gone", func() bool { return x.logged(notAnnounced).Len() == 1 })
		r.announce(true)
		x.listened(2)
		r.exec(`ALTER TABLE outbox_messages DISABLE TRIGGER walpost_notify`)
		eventually(t, "the relay has noticed", func() bool { return x.logged(notAnnounced).Len() == 2 })
		r.put(31, 40)
		r.pending(0)
		r.exec(`ALTER TABLE outbox_messages ENABLE TRIGGER walpost_notify`)
		x.listened(3)

		// The connection goes.
		r.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE '%pg_trigger%' AND pid <> pg_backend_pid()
			AND datname = current_database() AND state = 'idle'`)
		r.put(41, 50)
		r.pending(0)
		x.listened(4)

		// A row that is due later, and locked then; its lock goes in silence.
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, available_at) VALUES
			('order', 1, 'order.placed', '{"n": 52}', now() + interval '2 seconds'), ('order', 2, 'order.placed', '{"n": 51}', now() + interval '2 seconds')`)
		taker := r.conn()
		r.must(run(t.Context(), taker, `BEGIN; SELECT FROM outbox_messages WHERE payload = '{"n": 52}' FOR UPDATE`))
		r.pending(1)
		r.must(run(t.Context(), taker, `COMMIT`))
		r.pending(0)

		// A row that fails until it is a dead letter, and one that waits for that.
		r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload) VALUES
			('order', 3, 'order.*', '{}'), ('order', 3, 'order.placed', '{"n": 53}')`)
		eventually(t, "every row is settled", func() bool { return r.unmarked() == 0 })
		r.storedIs(1, 53)
		if n := r.query1(`SELECT count(*) FROM outbox_messages_dlq`); n != "1" {
			t.Errorf("%s dead letters, want 1", n)
		}
		x.quiet("row_locked", "missed_rows")
	})
}

// TestNotifyWithoutTheRelay: a relay that is stopped (SIGSTOP) must not have the
// server keep its notifications.
func TestNotifyWithoutTheRelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.announce(true)
	p := r.launch("WALPOST_MODE=poll", "WALPOST_FALLBACK_INTERVAL=1h")
	listeners := func() string {
		return r.query1(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_trigger%' AND pid <> pg_backend_pid()`)
	}
	eventually(t, "the relay listens", func() bool { return bytes.Contains(p.logTail(), []byte(announced)) })
	r.put(1, 10)
	r.pending(0)
	r.must(p.signal(syscall.SIGSTOP))
	eventually(t, "the server has ended the session", func() bool { return listeners() == "0" })
	r.put(11, 20)
	r.must(p.signal(syscall.SIGCONT))
	r.pending(0)
	r.storedIs(1, 20)
}
