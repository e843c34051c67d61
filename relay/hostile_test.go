package relay_test

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/testenv"
)

// set are columns of a row with their SQL expressions.
type set map[string]string

// hostile are rows that must not be sent, each with the class of its failure.
var hostile = []struct {
	name, class string
	row         set
}{
	{"space", "subject", set{"event_type": `'order placed'`}},
	{"star", "subject", set{"event_type": `'order.*'`}},
	{"greater", "subject", set{"event_type": `'order.>'`}},
	{"control bytes", "subject", set{"event_type": `E'order.\x01\x7f'`}},
	{"line break", "subject", set{"event_type": `E'order\r\nNats-Rollup: all'`}},
	{"5,000 characters", "subject", set{"event_type": `repeat('x', 5000)`}},
	{"longer than a subject", "subject", set{"event_type": `repeat('x', 1020)`}},
	{"unicode", "subject", set{"event_type": `'order.größe.📦'`}},
	{"empty", "subject", set{"event_type": `''`}},
	{"empty token", "subject", set{"event_type": `'order..placed'`}},
	{"last token empty", "subject", set{"event_type": `'order.'`}},
	{"uncovered", "uncovered", set{"event_type": `'payment.made'`}},
	{"JetStream's own", "uncovered", set{"event_type": `'$JS.API.STREAM.DELETE.EVENTS'`}},
	{"2 MiB payload", "size", set{"payload": `jsonb_build_object('n', repeat('x', 2 << 20))`}},
	{"70,000 bytes of trace", "headers", set{"trace_id": `repeat('x', 70000)`}},
	{"70,000 bytes once encoded", "headers", set{"aggregate_type": `repeat(E'\n', 23400)`}},
}

// strange are rows that look no better and are to be delivered.
var strange = []set{
	{"aggregate_type": `E'a\r\nNats-Rollup: all'`},
	{"trace_id": `E'\x01\x7f "%" größe'`},
	{"aggregate_id": `-9223372036854775808`, "tenant_id": `-1`},
	{"occurred_at": `'infinity'`},
	{"occurred_at": `'4713-01-01 BC'`},
	{"available_at": `'-infinity'`},
	{"event_type": `'order.Nats-Rollup:%00"{}$x'`},
}

// insert is the statement for a row of number n (N in the payload) with some columns of
// one's own.
func (s set) insert(table string, n int, defaults set) string {
	row := maps.Clone(defaults)
	row["payload"] = `jsonb_build_object('n', N)`
	maps.Copy(row, s)
	row["payload"] = strings.ReplaceAll(row["payload"], "N", strconv.Itoa(n))
	columns := slices.Sorted(maps.Keys(row))
	values := make([]string, len(columns))
	for i, c := range columns {
		values[i] = row[c]
	}
	return fmt.Sprintf(`INSERT INTO %s (%s) VALUES (%s)`, table, strings.Join(columns, ", "), strings.Join(values, ", "))
}

var canonicalRow = set{"aggregate_type": `'order'`, "aggregate_id": `1`, "event_type": `'order.placed'`}

// parkedRow is what a hostile row's own columns say of it.
type parkedRow struct {
	ID, Attempts       int
	LastError, Due     string
	Pending, BackedOff bool
}

func (r *rig) parkedRows(c *pgx.Conn) []parkedRow {
	r.t.Helper()
	rows, err := c.Query(r.t.Context(), `SELECT id::int, attempts::int, coalesce(last_error, '') AS last_error, available_at::text AS due,
		processed_at IS NULL AS pending, available_at >= occurred_at + interval '30 seconds' AS backed_off
		FROM outbox_messages WHERE processed_at IS NULL ORDER BY id`)
	r.must(err)
	parked, err := pgx.CollectRows(rows, pgx.RowToStructByName[parkedRow])
	r.must(err)
	return parked
}

func TestHostileRowsAreParked(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	r.cfg.OnPoison = fallback.Skip // the good rows are of the same aggregate
	r.createStream(func(c *jetstream.StreamConfig) { c.Subjects = []string{"events.order", "events.order.>"} })
	x := r.start().streaming()
	r.keep()

	// Every hostile row stands between two good ones, first each in a transaction
	// of its own, then all in one.
	c, good := r.conn(), 0
	commit := func(row set, n int) { r.must(run(t.Context(), c, row.insert("outbox_messages", n, canonicalRow))) }
	for range 2 {
		for _, h := range hostile {
			commit(nil, good)
			commit(h.row, -1)
			good++
		}
		r.must(run(t.Context(), c, "BEGIN"))
	}
	for _, row := range strange {
		commit(row, good)
		good++
	}
	r.must(run(t.Context(), c, "COMMIT"))
	commit(hostile[0].row, -1) // and one behind the stream's last message
	r.pending(0)
	r.storedIs(0, good-1)

	parked := r.parkedRows(c)
	if want := 2*len(hostile) + 1; len(parked) != want {
		t.Fatalf("%d rows are parked, want %d", len(parked), want)
	}
	classes := map[string]int{}
	for i, p := range parked {
		h := hostile[i%len(hostile)]
		classes[h.class]++
		if p.Attempts != 1 || !p.BackedOff || !strings.HasPrefix(p.LastError, h.class+": ") || len(p.LastError) > 300 {
			t.Errorf("%s: %+v, want 1 attempt, a later available_at, and a short last_error of class %s", h.name, p, h.class)
		}
	}
	for class, n := range classes {
		if got := x.metric("outbox_failures_total", "class", class); got != float64(n) {
			t.Errorf("outbox_failures_total of class %s is %v, want %d", class, got, n)
		}
	}
	if got := x.metric("outbox_failures_total", "event_type", "payment.made", "class", "uncovered"); got != 2 {
		t.Errorf("outbox_failures_total of event type payment.made is %v, want 2", got)
	}
	if n := x.metric("walpost_sessions_total"); n != 0 {
		t.Errorf("%v sessions have ended on a row that the relay itself refuses", n)
	}
	r.passes(r.here())

	// The WAL brings them all again.
	x.halt()
	r.rewind()
	r.start().streaming()
	commit(nil, good)
	r.passes(r.here())
	r.storedIs(0, good)
	if again := r.parkedRows(c); !slices.Equal(again, parked) {
		t.Errorf("a restart changed parked rows:\n%+v\n%+v", parked, again)
	}
}
