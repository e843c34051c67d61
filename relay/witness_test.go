package relay_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// What a test asks the two servers and the relay about.

// metric sums the samples of a metric that carry the labels, given as name and
// value in turn.
func (x *running) metric(name string, labels ...string) float64 {
	x.rig.t.Helper()
	families, err := x.registry.Gather()
	x.rig.must(err)
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			has := map[string]string{}
			for _, l := range m.GetLabel() {
				has[l.GetName()] = l.GetValue()
			}
			if carries(has, labels) {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

// histogram is how many values a histogram has seen, and their sum.
func (x *running) histogram(name string) (count uint64, sum float64) {
	x.rig.t.Helper()
	families, err := x.registry.Gather()
	x.rig.must(err)
	for _, f := range families {
		if f.GetName() == name {
			h := f.GetMetric()[0].GetHistogram()
			count, sum = h.GetSampleCount(), h.GetSampleSum()
		}
	}
	return count, sum
}

func carries(has map[string]string, labels []string) bool {
	for l := range slices.Chunk(labels, 2) {
		if has[l[0]] != l[1] {
			return false
		}
	}
	return true
}

// alarmed waits for an alarm, in the log and in the metric, and returns what the
// first one says.
func (x *running) alarmed(name string) map[string]any {
	x.rig.t.Helper()
	var first map[string]any
	eventually(x.rig.t, "alarm "+name, func() bool {
		first = x.alarm(name)
		return first != nil
	})
	if x.metric("walpost_alarms_total", "alarm", name) < 1 {
		x.rig.t.Errorf("alarm %s is in the log and not in walpost_alarms_total", name)
	}
	return first
}

// alarm is the first alarm of a name so far, nil where there is none.
func (x *running) alarm(name string) map[string]any {
	for _, e := range x.logs.All() {
		if fields := e.ContextMap(); fields["alarm"] == name {
			return fields
		}
	}
	return nil
}

// quiet fails the test where the relay has raised one of the alarms.
func (x *running) quiet(names ...string) {
	x.rig.t.Helper()
	for _, name := range names {
		if a := x.alarm(name); a != nil {
			x.rig.t.Errorf("alarm %s, and nothing was wrong: %v", name, a)
		}
	}
}

func (x *running) logged(message string) *observer.ObservedLogs {
	return x.logs.FilterMessage(message)
}

// over waits until the log says once that an alarm is over.
func (x *running) over(name string) {
	x.rig.t.Helper()
	eventually(x.rig.t, "alarm "+name+" is over", func() bool { return x.logs.FilterField(zap.String("alarm_over", name)).Len() > 0 })
	if n := x.logs.FilterField(zap.String("alarm_over", name)).Len(); n != 1 {
		x.rig.t.Errorf("the log says %d times that alarm %s is over", n, name)
	}
}

// put commits events of aggregate 1 with the numbers from..to in their payload,
// all in one transaction.
func (r *rig) put(from, to int) {
	r.t.Helper()
	r.exec(putSQL, "order.placed", from, to)
}

const putSQL = `INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload)
	SELECT 'order', 1, $1, jsonb_build_object('n', n) FROM generate_series($2::int, $3::int) n ORDER BY n`

// numbers are the numbers in the payloads of the stream's messages, in order.
func (r *rig) numbers() []int {
	r.t.Helper()
	return numbersOf(r.t, r.stored())
}

func numbersOf(t *testing.T, messages []*natsjs.RawStreamMsg) []int {
	t.Helper()
	var ns []int
	for _, m := range messages {
		var p struct{ N int }
		if err := json.Unmarshal(m.Data, &p); err != nil {
			t.Fatalf("message %d: %v: %.100q", m.Sequence, err, m.Data)
		}
		ns = append(ns, p.N)
	}
	return ns
}

// storedIs compares the stream's numbers with ranges, each given as its first
// and its last.
func (r *rig) storedIs(ranges ...int) {
	r.t.Helper()
	want := span(ranges...)
	if got := r.numbers(); !slices.Equal(got, want) {
		r.t.Fatalf("stored %d messages %s, want %d %s", len(got), brief(got), len(want), brief(want))
	}
}

func span(ranges ...int) (ns []int) {
	for p := range slices.Chunk(ranges, 2) {
		for n := p[0]; n <= p[1]; n++ {
			ns = append(ns, n)
		}
	}
	return ns
}

// brief renders numbers as ranges.
func brief(ns []int) string {
	s := ""
	for i := 0; i < len(ns); {
		j := i
		for j+1 < len(ns) && ns[j+1] == ns[j]+1 {
			j++
		}
		s += fmt.Sprintf(" %d-%d", ns[i], ns[j])
		if i = j + 1; len(s) > 400 {
			return "[" + s[1:] + " ...]"
		}
	}
	return "[" + strings.TrimSpace(s) + "]"
}

// pending waits until so many rows are neither marked nor recorded as failed.
func (r *rig) pending(want int) {
	r.t.Helper()
	c := r.conn()
	got := -1
	eventually(r.t, fmt.Sprintf("%d rows are pending", want), func() bool {
		r.must(c.QueryRow(r.t.Context(), `SELECT count(*) FROM outbox_messages WHERE processed_at IS NULL AND last_error IS NULL`).Scan(&got))
		return got == want
	})
}

// here is the end of the WAL.
func (r *rig) here() string {
	r.t.Helper()
	return r.query1(`SELECT pg_current_wal_insert_lsn()::text`)
}

// passes waits until the slot's confirmed LSN has reached one.
func (r *rig) passes(lsn string) {
	r.t.Helper()
	eventually(r.t, "the LSN is confirmed up to "+lsn, func() bool { return r.confirmedPast(lsn) })
}

func (r *rig) confirmedPast(lsn string) bool {
	r.t.Helper()
	return r.query1(`SELECT coalesce((SELECT confirmed_flush_lsn >= $1::pg_lsn FROM pg_replication_slots WHERE slot_name = $2), false)`, lsn, r.cfg.Slot) == "true"
}

// pinned fails the test where the confirmed LSN has reached one. It looks after
// the relay has sent two more standby statuses.
func (r *rig) pinned(lsn string) {
	r.t.Helper()
	for range 2 {
		last := r.reply()
		eventually(r.t, "a standby status", func() bool { return r.reply() != last })
	}
	if r.confirmedPast(lsn) {
		r.t.Errorf("the LSN is confirmed past %s, where something is not settled", lsn)
	}
}

func (r *rig) reply() string {
	return r.query1(`SELECT coalesce((SELECT max(r.reply_time)::text FROM pg_stat_replication r
		JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.slot_name = $1), '')`, r.cfg.Slot)
}

// keep copies the relay's slot as it is now; rewind puts a copy of that in its
// place, so that a relay that starts then gets everything since once more. It is
// what a crash of the server does, without one.
func (r *rig) keep() {
	r.t.Helper()
	r.t.Cleanup(func() { r.dropSlot(r.cfg.Slot + "_kept") })
	r.exec(`SELECT pg_copy_logical_replication_slot($1, $2)`, r.cfg.Slot, r.cfg.Slot+"_kept")
}

func (r *rig) rewind() {
	r.t.Helper()
	r.dropSlot(r.cfg.Slot)
	r.exec(`SELECT pg_copy_logical_replication_slot($1, $2)`, r.cfg.Slot+"_kept", r.cfg.Slot)
}

// js is a client of the test's own.
func (r *rig) js() natsjs.JetStream {
	r.t.Helper()
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	return testenv.JetStream(r.t, nc)
}

// createStream makes the stream as the relay would, with what change does to it.
func (r *rig) createStream(change func(*natsjs.StreamConfig)) {
	r.t.Helper()
	cfg := natsjs.StreamConfig{
		Name: "EVENTS", Subjects: []string{"events.>"}, Discard: natsjs.DiscardNew, Duplicates: 2 * time.Minute, AllowDirect: true,
		AllowBatchPublish: r.cfg.Stream.Batching == jetstream.BatchFast, AllowAtomicPublish: r.cfg.Stream.Batching == jetstream.BatchAtomic,
	}
	if change != nil {
		change(&cfg)
	}
	_, err := r.js().CreateStream(r.t.Context(), cfg)
	r.must(err)
}

// seize commits the events of a transaction and hands the table over at once to
// a session that has it locked in ACCESS EXCLUSIVE mode: nothing, and so no mark
// either, comes in between.
func (r *rig) seize(sql string, args ...any) *pgx.Conn {
	r.t.Helper()
	ctx := r.t.Context()
	writer, err := r.conn().Begin(ctx)
	r.must(err)
	_, err = writer.Exec(ctx, sql, args...)
	r.must(err)

	taker := r.conn()
	r.must(run(ctx, taker, "BEGIN"))
	if r.cfg.Outboxes[0].Mark == outbox.MarkJournal { // where the marks are; a view's tables are locked one after the other
		r.must(run(ctx, taker, "LOCK TABLE public.outbox_journal IN ACCESS EXCLUSIVE MODE"))
	}
	locked := make(chan error, 1)
	go func() { locked <- run(ctx, taker, "LOCK TABLE outbox_messages IN ACCESS EXCLUSIVE MODE") }()
	eventually(r.t, "the table's next owner waits", func() bool {
		return r.query1(`SELECT count(*) FROM pg_locks WHERE pid = $1 AND NOT granted`, taker.PgConn().PID()) == "1"
	})
	r.must(writer.Commit(ctx))
	r.must(<-locked)
	return taker
}

func run(ctx context.Context, c *pgx.Conn, sql string) error {
	_, err := c.Exec(ctx, sql)
	return err
}
