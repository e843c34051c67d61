package relay_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// TestManyHeldRows: rows wait behind four failed ones, in full 10,000, and more come all the
// time. Nobody else has to wait, not over a restart either. When the cause is gone
// they come out in order, although their aggregates are never quiet.
func TestManyHeldRows(t *testing.T) {
	t.Parallel()
	for _, mode := range testenv.Some(t, 1, relay.ModePoll, relay.ModeAuto) {
		testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
			testManyHeldRows(t, pg, mode)
		})
	}
}

func testManyHeldRows(t *testing.T, pg *testenv.Postgres, mode relay.Mode) {
	r := newRig(t, pg)
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.account.moved"} })
	r.cfg.FallbackInterval = time.Hour // whoever has to be woken is woken
	r.cfg.Mode, r.cfg.Retry = mode, table.Retry{Backoff: 300 * time.Millisecond, MaxAttempts: 10_000}
	l := newLedger(r) // of accounts 1 to 16
	x := r.start()
	rows := testenv.Size(t, 4000, 10_000)
	r.exec(followSQL, 101, 104, rows/4+1, "account.cursed", 0)
	eventually(t, "the rows are held", func() bool { return r.count(heldRows) == rows })
	held := &ledger{rig: r, accounts: 4}
	stopHeld := held.keepMoving(100)
	stop := l.start(load{writers: 1, rows: 5, pause: 40 * time.Millisecond})
	for range 2 {
		r.othersPass(rows)
		eventually(t, "4 aggregates are held", func() bool { return x.metric("walpost_held_aggregates") == 4 })
		x.halt()
		x = r.startAtWork()
	}
	before := r.count(heldRows)
	r.setSubjects("events.account.moved", "events.account.cursed")
	eventually(t, "the rows come out", func() bool { return r.count(heldRows) < before })
	x.halt()
	t.Logf("%d rows are held, and %d were when the relay stopped", before, r.count(heldRows))
	x = r.start()
	eventually(t, "every hold has ended", func() bool { return x.metric("walpost_held_aggregates") == 0 && r.count(heldRows) == 0 })
	stopHeld()
	stop()
	l.delivered()
	if n := x.metric("walpost_missed_rows_total"); n != 0 {
		t.Errorf("%v rows were missed", n)
	}
}

// TestRowsAreHeldBehindOneThatIsAlwaysDue: on a slow server a failed row may be due in every pass. The rows
// behind it are recorded as held all the same. The creation of the slot waits for that.
func TestRowsAreHeldBehindOneThatIsAlwaysDue(t *testing.T) {
	t.Parallel()
	for name, fail := range map[string]string{
		"refused":    `UPDATE outbox_messages SET event_type = 'account.cursed' WHERE id = 1`,
		"unreadable": `UPDATE outbox_messages SET trace_id = broken() WHERE id = 1`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order.placed"} })
			r.cfg.Retry = table.Retry{Backoff: time.Millisecond, MaxAttempts: 10_000}
			r.exec(breakTimes + `; ALTER TABLE outbox_messages ALTER trace_id TYPE timestamptz USING NULL`)
			r.put(1, 11)
			r.exec(fail)
			r.exec(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql
				AS $$ BEGIN PERFORM pg_sleep(0.3); RETURN NEW; END $$;
				CREATE TRIGGER slow BEFORE UPDATE ON outbox_messages FOR EACH ROW
				WHEN (NEW.attempts > OLD.attempts) EXECUTE FUNCTION slow()`)
			x := r.start()
			eventually(t, "the rows are held", func() bool { return r.count(heldRows) == 10 })
			x.streaming()
			if n := r.query1(`SELECT count(*) FROM outbox_messages WHERE attempts > 0`); n != "1" {
				t.Errorf("%s rows have attempts, want 1", n)
			}
		})
	}
}

// keepMoving writes to a ledger's accounts, numbered from after on, without a pause
// longer than some milliseconds.
func (l *ledger) keepMoving(after int) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	c := l.rig.conn()
	done := make(chan struct{})
	go func() {
		defer close(done)
		for n := 1; ctx.Err() == nil; n++ {
			if _, err := c.Exec(ctx, moveSQL, after+1+n%l.accounts, 1+n%3, 0); err != nil {
				return
			}
			sleepUntil(ctx, 20*time.Millisecond)
		}
	}()
	stop = sync.OnceFunc(func() { cancel(); <-done })
	l.rig.t.Cleanup(stop)
	return stop
}

// othersPass wants retries, held rows, due rows and live rows of other aggregates
// delivered while so many rows are held and stay so.
func (r *rig) othersPass(rows int) {
	r.t.Helper()
	next := r.count(`SELECT max(id) + 1 FROM ledger`)
	others := fmt.Sprintf(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND aggregate_id BETWEEN %d AND %d`, next, next+29)
	r.exec(followSQL, next, next+9, 20, "account.cursed", 0)
	r.exec(followSQL, next+10, next+19, 1, "account.moved", 3)
	r.exec(followSQL, next+20, next+29, 20, "account.moved", 0)
	eventually(r.t, "of the others, too, some fail and some wait", func() bool { return r.count(others+` AND last_error IS NOT NULL`) == 200 })
	r.exec(`UPDATE outbox_messages SET event_type = 'account.moved' WHERE event_type = 'account.cursed' AND aggregate_id >= $1`, next)
	begun := time.Now()
	eventually(r.t, "the others are delivered", func() bool { return r.count(others) == 0 })
	r.t.Logf("rows of other aggregates were delivered within %s, %d rows are held", time.Since(begun).Round(time.Millisecond), r.count(heldRows))
	if n := r.count(`SELECT count(*) FROM outbox_messages WHERE processed_at IS NOT NULL AND aggregate_id BETWEEN 101 AND 104`); n != 0 {
		r.t.Fatalf("%d rows have passed the failed ones of their aggregates", n)
	}
	if n := r.count(heldRows); n < rows {
		r.t.Fatalf("%d rows are held, want %d: the test shows nothing", n, rows)
	}
}

// setSubjects has the stream listen on other subjects.
func (r *rig) setSubjects(subjects ...string) {
	r.t.Helper()
	s, err := r.js().Stream(r.t.Context(), "EVENTS")
	r.must(err)
	cfg := s.CachedInfo().Config
	cfg.Subjects = subjects
	_, err = r.js().UpdateStream(r.t.Context(), cfg)
	r.must(err)
}
