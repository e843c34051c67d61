package relay_test

import (
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// TestAnOutageIsNoAttempt: JetStream is away for hundreds of backoffs, and
// PostgreSQL restarts meanwhile. No row is blamed, and afterwards everything
// arrives once and in order.
func TestAnOutageIsNoAttempt(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]relay.Mode{"streaming": relay.ModeAuto, "polling": relay.ModePoll} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
				t.Parallel()
				r := newRigWith(t, pg, testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
				r.cfg.Mode = mode
				a := newAbsence(r, 1)
				r.must(r.nats.Kill())
				a.lasts(func() { r.must(pg.Restart(t.Context())) })
				r.must(r.nats.Start(t.Context()))
				a.isOver()
			})
		})
	}
}

// TestNoLeaderIsNoAttempt: the connection is up, but the stream has lost its quorum.
func TestNoLeaderIsNoAttempt(t *testing.T) {
	t.Parallel()
	nodes := testenv.NewNATSCluster(t, 3).Nodes
	r := newRigWith(t, testenv.SharedPostgres(t), nodes[0])
	a := newAbsence(r, 3)
	r.must(nodes[1].Stop(t.Context()))
	r.must(nodes[2].Stop(t.Context()))
	a.lasts(func() {})
	r.must(nodes[1].Start(t.Context()))
	r.must(nodes[2].Start(t.Context()))
	a.isOver()
}

// absence is a time without JetStream: rows are written, rows that have failed are
// due again, with others held behind them, and delayed rows fall due.
type absence struct {
	*ledger
	t     *testing.T
	relay *running
	stop  func() // the load
}

// cursed is an event type that is no subject's.
const cursed = "account cursed"

// followSQL commits events 1 to $3 of accounts $1 to $2; the first one is of
// another type.
const followSQL = `WITH account AS (INSERT INTO ledger SELECT a, $3::int FROM generate_series($1::int, $2::int) a RETURNING id, n)
	INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id, available_at)
	SELECT 1, 'account', id, CASE WHEN g = 1 THEN $4 ELSE 'account.moved' END, '{}', g, clock_timestamp() + $5::float8 * random() * interval '1 second'
	FROM account, generate_series(1, n) g ORDER BY g, id`

func newAbsence(r *rig, replicas int) *absence {
	r.t.Helper()
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects, c.Replicas = []string{"events.account.*"}, replicas })
	r.cfg.Retry = table.Retry{Backoff: time.Hour, MaxAttempts: 10}
	a := &absence{ledger: newLedger(r), t: r.t, relay: r.start()}
	r.exec(followSQL, 101, 105, 21, cursed, 0)
	eventually(r.t, "the later rows are held", func() bool { return r.count(heldRows) == 100 })
	a.relay.halt()
	r.exec(`UPDATE outbox_messages SET event_type = 'account.moved', attempts = 3, available_at = clock_timestamp() + interval '3 seconds' WHERE event_type = $1`, cursed)

	r.cfg.Window = 4
	r.cfg.Retry = table.Retry{Backoff: 10 * time.Millisecond, MaxAttempts: 30_000}
	a.relay = r.startAtWork()
	r.exec(followSQL, 200, 200, 1, cursed, 0) // this one is at fault
	r.exec(followSQL, 301, 400, 1, "account.moved", 6)
	a.stop = a.start(load{writers: 2, rows: 10, pause: 60 * time.Millisecond})
	eventually(r.t, "the poison is tried again and again", func() bool { return a.tried() > 3 })
	// It is to break off in the middle of a Send, which the small window makes wait.
	before := r.storedCount()
	r.exec(followSQL, 501, 600, 25, "account.moved", 0)
	eventually(r.t, "the relay sends a lot", func() bool { return r.storedCount() > before+500 })
	return a
}

// tried is how often the row was that is at fault.
func (a *absence) tried() int {
	a.t.Helper()
	return a.rig.count(`SELECT attempts FROM outbox_messages WHERE aggregate_id = 200`)
}

// lasts some seconds, in the middle of which something else happens.
func (a *absence) lasts(event func()) {
	a.t.Helper()
	eventually(a.t, "the relay waits", func() bool { return a.relay.Status().State == "waiting" })
	before := a.tried()
	time.Sleep(2 * time.Second)
	event()
	time.Sleep(2 * time.Second)
	if after := a.tried(); after != before {
		a.t.Errorf("a row that has failed was tried %d times while JetStream was away", after-before)
	}
	a.blameless()
	if a.rig.unmarked() < 100 {
		a.t.Error("nothing has waited: the test shows nothing")
	}
}

// blameless fails the test where a row has been blamed for the outage.
func (a *absence) blameless() {
	a.t.Helper()
	for what, sql := range map[string]string{
		"rows have an attempt":         `SELECT count(*) FROM outbox_messages WHERE attempts > 0 AND aggregate_id NOT IN (101, 102, 103, 104, 105, 200)`,
		"rows have one attempt more":   `SELECT count(*) FROM outbox_messages WHERE attempts NOT IN (0, 3) AND aggregate_id <> 200`,
		"rows have lost their attempt": `SELECT 5 - count(*) FROM outbox_messages WHERE attempts = 3 AND aggregate_id BETWEEN 101 AND 105`,
		"rows are recorded as failed":  `SELECT count(*) FROM outbox_messages WHERE last_error IS NOT NULL AND aggregate_id NOT IN (101, 102, 103, 104, 105, 200)`,
		"rows are dead letters":        `SELECT count(*) FROM outbox_messages_dlq`,
	} {
		if n := a.rig.count(sql); n != 0 {
			a.t.Errorf("%d %s", n, what)
		}
	}
}

func (a *absence) isOver() {
	a.t.Helper()
	before := a.tried()
	eventually(a.t, "the poison is tried again", func() bool { return a.tried() > before })
	a.rig.exec(`WITH gone AS (DELETE FROM ledger WHERE id = 200) DELETE FROM outbox_messages WHERE aggregate_id = 200`)
	a.stop()
	a.delivered()
	a.blameless()
	if n := a.relay.metric("walpost_missed_rows_total"); n != 0 {
		a.t.Errorf("%v rows were missed", n)
	}
	a.relay.quiet("events_lost", "foreign_message", "rival", "slot_given_up")
}
