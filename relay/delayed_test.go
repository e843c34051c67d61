package relay_test

import (
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/relay"
)

// remindSQL commits rows with the numbers from..to that fall due somewhere between
// two times from now, in seconds. They belong to the ledger's accounts and to as
// many other ones.
const remindSQL = `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
	SELECT 1, 'account', 1 + n % 32, 'account.reminded', jsonb_build_object('n', n),
		clock_timestamp() + ($3::float8 + random() * ($4::float8 - $3::float8)) * interval '1 second'
	FROM generate_series($1::int, $2::int) n`

const remindersPending = `SELECT count(*) FROM outbox_messages WHERE event_type = 'account.reminded' AND processed_at IS NULL AND available_at < 'infinity'`

// TestDelayedRows: rows for later, in full 10,000 that are due over a minute, among live rows of the
// same and of other aggregates.
func TestDelayedRows(t *testing.T) {
	t.Parallel()
	t.Run("poll mode", func(t *testing.T) {
		t.Parallel()
		testDelayedRows(t, testenv.SharedPostgres(t), relay.ModePoll, 1000, 10)
	})
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		testDelayedRows(t, pg, relay.ModeAuto, testenv.Size(t, 2000, 10_000), testenv.Size(t, 15, 60))
	})
}

func testDelayedRows(t *testing.T, pg *testenv.Postgres, mode relay.Mode, rows, over int) {
	r := newRig(t, pg)
	r.cfg.Mode, r.cfg.FallbackInterval = mode, time.Hour // whoever is due is not found by chance
	l := newLedger(r)
	r.exec(remindSQL, 1, rows/2, 2, over) // before there is a slot
	var live latencies
	r.cfg.OnStored = live.add
	x := r.startAtWork()
	work := load{writers: 2, rows: 10, pause: 80 * time.Millisecond}
	unsafe := *l
	unsafe.rig = r.with("synchronous_commit=off")
	stopSafe, stopUnsafe := l.start(work), unsafe.start(work)
	later := unsafe.rig.conn()
	for n := rows/2 + 1; n <= rows; n += 10 {
		_, err := later.Exec(t.Context(), remindSQL, n, n+9, 1.1, over)
		r.must(err)
	}
	eventually(t, "half of the rows for later are due", func() bool { return r.count(remindersPending) < rows/2 })
	stopSafe()
	stopUnsafe()
	r.liveRowsAreStored()
	if n := r.count(remindersPending); n == 0 {
		t.Error("the live rows have waited for those that were not due")
	}
	stopSafe = l.start(work)
	for n := r.count(remindersPending); n > 0; {
		before := n
		eventually(t, "rows fall due", func() bool { n = r.count(remindersPending); return n < before })
	}
	stopSafe()
	r.liveRowsAreStored()
	late := r.reminded(rows)
	l.movedIs()
	t.Logf("late by %s; live rows stored after %s", late, &live)
	x.healthy()
}

// startAtWork starts a relay and waits until it delivers in the way it is to.
func (r *rig) startAtWork() *running {
	r.t.Helper()
	x := r.start()
	if r.cfg.Mode != relay.ModePoll {
		return x.streaming()
	}
	eventually(r.t, "the relay polls", func() bool { return x.Status().State == "polling" })
	return x
}

// with is the rig with a connection parameter.
func (r *rig) with(parameter string) *rig {
	other := *r
	other.url += "&" + parameter
	return &other
}

func (r *rig) count(sql string, args ...any) int {
	r.t.Helper()
	n, err := strconv.Atoi(r.query1(sql, args...))
	r.must(err)
	return n
}

func (r *rig) liveRowsAreStored() {
	r.t.Helper()
	eventually(r.t, "the live rows are stored", func() bool {
		return r.count(`SELECT count(*) FROM outbox_messages WHERE event_type = 'account.moved' AND processed_at IS NULL`) == 0
	})
}

// healthy fails the test where the relay was not content all the time.
func (x *running) healthy() {
	x.rig.t.Helper()
	x.quiet("missed_rows", "row_locked", "row_unsettled", "foreign_message", "slot_given_up")
	for _, name := range []string{"walpost_missed_rows_total", "walpost_sessions_total", "outbox_failures_total"} {
		if n := x.metric(name); n != 0 {
			x.rig.t.Errorf("%s is %v", name, n)
		}
	}
}

// ofType are the stream's messages of one event type, in order.
func (r *rig) ofType(eventType string) []*jetstream.RawStreamMsg {
	r.t.Helper()
	return slices.DeleteFunc(r.stored(), func(m *jetstream.RawStreamMsg) bool { return m.Subject != "events."+eventType })
}

// reminded wants every row for later with the numbers from 1 to n in the stream
// once, none before it was due, and returns how late they were.
func (r *rig) reminded(n int) *latencies {
	r.t.Helper()
	due := map[int]time.Time{}
	rows, err := r.conn().Query(r.t.Context(), `SELECT (payload ->> 'n')::int, available_at FROM outbox_messages
		WHERE event_type = 'account.reminded' AND available_at < 'infinity'`)
	r.must(err)
	for rows.Next() {
		var number int
		var at time.Time
		r.must(rows.Scan(&number, &at))
		due[number] = at
	}
	r.must(rows.Err())
	messages := r.ofType("account.reminded")
	numbers := numbersOf(r.t, messages)
	late := &latencies{}
	early := 0
	for i, m := range messages {
		late.add(m.Time.Sub(due[numbers[i]]))
		if early++; !m.Time.Before(due[numbers[i]]) {
			early--
		}
	}
	if early > 0 {
		r.t.Errorf("%d rows were stored before they were due: %s", early, late)
	}
	slices.Sort(numbers)
	if want := span(1, n); !slices.Equal(numbers, want) {
		r.t.Fatalf("stored %d rows %s, want %d", len(numbers), brief(numbers), n)
	}
	return late
}

// movedIs compares the ledger with the live rows alone.
func (l *ledger) movedIs() {
	l.rig.t.Helper()
	last := map[string]int{}
	messages := l.rig.ofType("account.moved")
	for _, m := range messages {
		account := m.Header.Get("ce-aggregateid")
		if n, _ := strconv.Atoi(m.Header.Get("ce-traceid")); n != last[account]+1 {
			l.rig.t.Fatalf("message %d: event %d of account %s follows event %d", m.Sequence, n, account, last[account])
		}
		last[account]++
	}
	if want := l.committed(); len(messages) != want {
		l.rig.t.Fatalf("the stream holds %d live events, want %d", len(messages), want)
	}
}

// TestDelayedRowInALongTransaction: it is known when its transaction ends, before
// it is due or after.
func TestDelayedRowInALongTransaction(t *testing.T) {
	t.Parallel()
	testenv.Cluster(t, func(t *testing.T, pg *testenv.Postgres) {
		t.Parallel()
		r := newRig(t, pg)
		l := newLedger(r)
		x := r.start().streaming()
		c, d := r.conn(), r.conn()
		r.must(run(t.Context(), c, `BEGIN`))
		r.must(run(t.Context(), d, `BEGIN`))
		_, err := c.Exec(t.Context(), remindSQL, 1, 50, 1.5, 2)
		r.must(err)
		_, err = d.Exec(t.Context(), remindSQL, 51, 100, 6, 7)
		r.must(err)
		stop := l.start(load{writers: 1, rows: 10, pause: 20 * time.Millisecond})
		time.Sleep(3 * time.Second)
		r.must(run(t.Context(), c, `COMMIT`)) // they have been due
		r.must(run(t.Context(), d, `COMMIT`)) // they are not due yet
		eventually(t, "all of them are marked", func() bool { return r.count(remindersPending) == 0 })
		stop()
		r.liveRowsAreStored()
		t.Logf("late by %s", r.reminded(100))
		l.movedIs()
		x.healthy()
	})
}

// TestDelayedRowIsMoved: available_at is no part of the message, and may change as
// long as the row is pending.
func TestDelayedRowIsMoved(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 100 * time.Millisecond
	x := r.start().streaming()
	r.exec(remindSQL, 1, 20, 3600, 7200)
	r.exec(remindSQL, 21, 40, 2, 2)
	r.exec(`UPDATE outbox_messages SET available_at = clock_timestamp() + interval '5 seconds' WHERE (payload ->> 'n')::int > 20`)
	eventually(t, "the other ones would have been due", func() bool {
		return r.query1(`SELECT clock_timestamp() > occurred_at + interval '2500 ms' FROM outbox_messages WHERE payload ->> 'n' = '21'`) == "true"
	})
	r.exec(`UPDATE outbox_messages SET available_at = clock_timestamp() + interval '10 ms' WHERE (payload ->> 'n')::int BETWEEN 1 AND 10`)
	r.exec(`UPDATE outbox_messages SET available_at = now() WHERE (payload ->> 'n')::int BETWEEN 11 AND 20`)
	eventually(t, "all of them are marked", func() bool { return r.count(remindersPending) == 0 })
	t.Logf("late by %s", r.reminded(40))
	x.healthy()
}

// TestDelayedRowsOutliveARelay that stops and starts while they wait, and a server
// that has forgotten what was confirmed.
func TestDelayedRowsOutliveARelay(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.createStream(func(c *jetstream.StreamConfig) { c.Duplicates = window })
	l := newLedger(r)
	x := r.start().streaming()
	r.keep()
	stop := l.start(load{writers: 2, rows: 10, pause: 20 * time.Millisecond})
	rows := 0
	later := func(n int, from, to float64) {
		r.exec(remindSQL, rows+1, rows+n, from, to)
		rows += n
	}
	for range 3 {
		later(200, 1.1, 8)
		left := r.count(remindersPending)
		eventually(t, "rows fall due", func() bool { return r.count(remindersPending) < left-20 })
		x.healthy()
		x.halt()
		later(30, 1.1, 1.5)
		eventually(t, "rows fall due that nobody sends", func() bool {
			return r.count(`SELECT count(*) FROM outbox_messages WHERE event_type = 'account.reminded' AND processed_at IS NULL AND available_at < now()`) > 20
		})
		r.rewind()
		x = r.start().streaming()
	}
	eventually(t, "all of them are marked", func() bool { return r.count(remindersPending) == 0 })
	stop()
	r.liveRowsAreStored()
	r.passes(r.here())
	t.Logf("late by %s", r.reminded(rows))
	l.movedIs()
	x.healthy()
}

// TestDelayedRowIsPoison: it is tried when it is due, and that is its first attempt.
func TestDelayedRowIsPoison(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 100 * time.Millisecond
	x := r.start().streaming()
	r.exec(set{"event_type": `'order placed'`, "occurred_at": `now() - interval '1 hour'`, "available_at": `now() + interval '1 hour'`}.
		insert("outbox_messages", 1, canonicalRow))
	r.put(2, 3)
	r.pending(1) // it holds nobody while it waits
	r.storedIs(2, 3)
	r.exec(`UPDATE outbox_messages SET available_at = clock_timestamp(), trace_id = clock_timestamp() WHERE payload ->> 'n' = '1'`)
	r.pending(0)
	row := func(sql string) string {
		return r.query1(`SELECT ` + sql + ` FROM outbox_messages WHERE payload ->> 'n' = '1'`)
	}
	if attempts, failure := row("attempts"), row("last_error"); attempts != "1" || !strings.HasPrefix(failure, "subject: ") {
		t.Errorf("attempts %s, last_error %q, want 1 of class subject", attempts, failure)
	}
	if row(`available_at >= trace_id::timestamptz + interval '30 seconds'`) != "true" {
		t.Error("it was tried before it was due")
	}
	r.put(4, 4) // and now it does
	eventually(t, "a later row is held", func() bool { return r.count(heldRows) == 1 })
	r.storedIs(2, 3)
	x.quiet("missed_rows", "row_locked")
	if n := x.metric("walpost_missed_rows_total"); n != 0 {
		t.Errorf("%v rows were missed", n)
	}
}

const heldRows = `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND last_error LIKE 'held: %'`

// TestDelayedRowBehindAParkedRow: when it falls due it waits like any other row.
func TestDelayedRowBehindAParkedRow(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = 100 * time.Millisecond
	x := r.start().streaming()
	r.exec(set{"event_type": `'order placed'`}.insert("outbox_messages", 1, canonicalRow))
	r.exec(set{"occurred_at": `now() - interval '1 hour'`, "available_at": `now() + interval '1 hour'`}.insert("outbox_messages", 2, canonicalRow))
	r.put(3, 4)
	eventually(t, "the live rows are held", func() bool { return r.count(heldRows) == 2 })
	r.pending(1)
	r.exec(`UPDATE outbox_messages SET available_at = now() WHERE payload ->> 'n' = '2'`)
	eventually(t, "the delayed one is held too", func() bool { return r.count(heldRows) == 3 })
	if n := r.storedCount(); n != 0 {
		t.Fatalf("%d rows have passed the failed one", n)
	}
	r.exec(`UPDATE outbox_messages SET event_type = 'order.placed', available_at = now() WHERE payload ->> 'n' = '1'`)
	eventually(t, "all of them are stored", func() bool { return r.storedCount() == 4 })
	r.put(5, 6)
	r.pending(0)
	r.storedIs(1, 6)
	eventually(t, "the hold has ended", func() bool { return x.metric("walpost_held_aggregates") == 0 })
	if n := x.metric("walpost_missed_rows_total"); n != 0 {
		t.Errorf("%v rows were missed", n)
	}
}

// TestDelayedRowFallsDueDuringAPass that is about another row: it has its turn at
// once, and not when the tables are searched for what was missed.
func TestDelayedRowFallsDueDuringAPass(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.FallbackInterval = time.Hour
	x := r.start().streaming()
	walsender := r.pid(`SELECT active_pid FROM pg_replication_slots WHERE slot_name = $1`, r.cfg.Slot)
	r.exec(remindSQL, 1, 1, 1.5, 1.5)
	r.exec(remindSQL, 2, 2, 3, 3)
	r.passes(r.here())
	r.must(syscall.Kill(walsender, syscall.SIGSTOP))
	r.put(100, 100) // which the pass has to have received
	eventually(t, "both are due", func() bool { return r.query1(`SELECT max(available_at) < now() FROM outbox_messages`) == "true" })
	time.Sleep(500 * time.Millisecond)
	r.must(syscall.Kill(walsender, syscall.SIGCONT))
	eventually(t, "both are marked", func() bool { return r.count(remindersPending) == 0 })
	t.Logf("late by %s", r.reminded(2))
	x.healthy()
}
