package relay_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// TestAppendOnlyModel has two relays deliver an append-only table, each a part of it, while people do to it what they do: transactions
// stay open, partitions go and come back, retention drops them, messages are lost, relays are killed. Every row that fits is stored
// once, and in order; none is deleted before; in the end nothing is deferred, and the progress is at the last row.
//
// WALPOST_CHANGES_FOR=1h goes on with other seeds for that long, and appends to the file that WALPOST_CHANGES_RESULTS names.
// WALPOST_CHANGES_SEED repeats one.
func TestAppendOnlyModel(t *testing.T) {
	t.Parallel()
	lasts, _ := time.ParseDuration(os.Getenv("WALPOST_CHANGES_FOR"))
	seed, err := strconv.ParseUint(os.Getenv("WALPOST_CHANGES_SEED"), 10, 64)
	if err != nil {
		seed = rand.Uint64() >> 20
	}
	did := map[string]int{}
	for until, ok := time.Now().Add(lasts), true; ok && !t.Failed(); ok = time.Now().Before(until) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			m, began := newModel(t, seed), time.Now()
			defer func() {
				for name, n := range m.did {
					did[name] += n
				}
				noteWorld(t, map[string]any{"seed": seed, "events": len(m.events) - 1, "did": m.did}, began)
			}()
			m.live(testenv.Size(t, 12, 80))
		})
		seed = rand.Uint64() >> 20
	}
	t.Logf("%v", did)
	if lasts == 0 {
		return
	}
	if did["partition dropped"] == 0 {
		t.Error("no partition was dropped")
	}
	for _, a := range modelActs {
		if least := 5; did[a.name] < least {
			t.Errorf("%s: %d times, want %d at least", a.name, did[a.name], least)
		}
	}
}

// model is what is known of a table and its rows.
type model struct {
	*rig
	rng    *rand.Rand
	did    map[string]int
	relays []*modelRelay
	events []*modelEvent // by number, from 1
	open   []func(commit bool) error
	away   *modelPart
	parts  []*modelPart // that retention has not dropped
	dir    string
}

type modelRelay struct {
	stream, slot string
	kinds        []string
	shard        outbox.Shard
	aggregates   []int // of the shard; nil: all
	mode         string
	serial       int // of its publication
	process      *process
}

// modelPart is a partition with ids from from to below to.
type modelPart struct {
	name     string
	from, to int64
}

type modelEvent struct {
	id        int64
	kind      string
	aggregate int
	committed bool
	fails     bool // until the stream takes it
	late      bool // it may come behind later ones
	lost      bool // its message was, and is stored again
}

// modelPartition is how many ids a partition has, and modelPartitions how many there are.
const modelPartition, modelPartitions = 50, 60

func newModel(t *testing.T, seed uint64) *model {
	t.Helper()
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{Settings: map[string]string{"wal_sender_timeout": "10s", "max_prepared_transactions": "20"}}))
	m := &model{rig: r, rng: rand.New(rand.NewPCG(seed, 0)), did: map[string]int{}, events: []*modelEvent{nil}, dir: t.TempDir()}
	t.Logf("WALPOST_CHANGES_SEED=%d", seed)
	m.makeTable()
	sharded := m.rng.IntN(3) == 0 && r.pg.Version() >= 15 // the relays divide the table by aggregates
	for i, kinds := range [][]string{{"a"}, {"b"}} {
		x := &modelRelay{stream: fmt.Sprintf("E%d", i+1), slot: fmt.Sprintf("walpost_%d", i+1), kinds: kinds, mode: "auto"}
		if m.rng.IntN(3) == 0 { // the progress alone brings its rows
			x.mode = "poll"
		}
		m.relays = append(m.relays, x)
		if sharded {
			x.kinds, x.shard = []string{"a", "b"}, outbox.Shard{Index: i + 1, Of: 2}
			of := modelTable()
			of.Shard = x.shard
			m.must(r.conn().QueryRow(t.Context(), `SELECT array_agg(aggregate_id) FROM (SELECT 0::bigint AS id, n::bigint AS aggregate_id FROM generate_series(0, 5) n) t
				WHERE `+of.ShardSQL("t")).Scan(&x.aggregates))
		}
		m.createStream(func(s *natsjs.StreamConfig) {
			s.Name, s.Subjects, s.Duplicates = x.stream, []string{strings.ToLower(x.stream) + ".order.>"}, 100*time.Millisecond
		})
	}
	return m
}

func modelTable() *outbox.Table {
	return &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical().Journaled(), Mark: outbox.MarkJournal}
}

// makeTable makes the table with its partitions in place of the one that is there.
func (m *model) makeTable() {
	m.t.Helper()
	m.exec(`ALTER TABLE outbox_messages RENAME TO model;
		CREATE TABLE outbox_messages (LIKE model INCLUDING DEFAULTS INCLUDING IDENTITY) PARTITION BY RANGE (id);
		DROP TABLE model CASCADE; ALTER TABLE outbox_messages ADD PRIMARY KEY (id)`)
	m.parts = nil
	for from := int64(1); from <= modelPartitions*modelPartition; from += modelPartition {
		p := &modelPart{fmt.Sprintf("p%d", from), from, from + modelPartition}
		m.parts = append(m.parts, p)
		m.exec(fmt.Sprintf(`CREATE TABLE %s PARTITION OF outbox_messages FOR VALUES FROM (%d) TO (%d)`, p.name, p.from, p.to))
	}
	m.exec(fmt.Sprintf(`CREATE TABLE rest PARTITION OF outbox_messages FOR VALUES FROM (%d) TO (MAXVALUE)`, modelPartitions*modelPartition+1))
	m.exec(strings.Join(table.AppendOnlySQL(modelTable(), "public."+table.AppendOnly), ";"))
}

// where is a relay's condition.
func (x *modelRelay) where() string {
	return "aggregate_type IN ('" + strings.Join(x.kinds, "', '") + "')"
}

func (x *modelRelay) covers(e *modelEvent) bool {
	return slices.Contains(x.kinds, e.kind) && (x.shard.All() || slices.Contains(x.aggregates, e.aggregate))
}

func (m *model) configure(x *modelRelay) string {
	m.t.Helper()
	type o = map[string]any
	text, err := json.Marshal(o{
		"postgres": o{"publication": fmt.Sprintf("%s_%d", x.slot, x.serial), "url": m.url, "slot": x.slot},
		"outboxes": []o{{"table": "public.outbox_messages", "mark": "journal", "where": x.where()}},
		"fallback": o{"interval": "1s", "backoff": "1s", "max_attempts": 3}, "retention": o{"interval": "0s"},
		"mode": x.mode, "shard": x.shard.String(), "nats": o{"stream": x.stream, "subject": strings.ToLower(x.stream) + ".{event_type}"},
	})
	m.must(err)
	path := filepath.Join(m.dir, x.slot+".yaml")
	m.must(os.WriteFile(path, text, 0o600))
	return path
}

func (m *model) run(x *modelRelay, args ...string) *exec.Cmd {
	m.t.Helper()
	m.cfg.Slot = x.slot
	return m.command(append(args, "--config", m.configure(x))...)
}

func (m *model) walpost(x *modelRelay, args ...string) {
	m.t.Helper()
	if out, err := m.run(x, args...).CombinedOutput(); err != nil {
		m.t.Fatalf("walpost %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

func (m *model) start(x *modelRelay) {
	m.t.Helper()
	x.process = m.launchAs(m.run(x, "run"))
	eventually(m.t, "the relay delivers", func() bool {
		if x.process.ended() {
			m.t.Fatalf("the relay ended: %s", x.process.logTail())
		}
		s := x.process.state()
		return s == "streaming" || s == "polling"
	})
}

func (m *model) any() *modelRelay { return m.relays[m.rng.IntN(len(m.relays))] }

// rows are new events, and the statement that inserts them.
func (m *model) rows(late bool, due, eventType string) (es []*modelEvent, sql string) {
	var values []string
	for range 1 + m.rng.IntN(40) {
		e := &modelEvent{kind: []string{"a", "b", "c"}[m.rng.IntN(3)], aggregate: m.rng.IntN(6), late: late, fails: eventType != "order.placed"}
		m.events = append(m.events, e)
		values = append(values, fmt.Sprintf(`(1, '%s', %d, '%s', '{"n": %d}', '%[4]d', %s)`, e.kind, e.aggregate, eventType, len(m.events)-1, due))
		es = append(es, e)
	}
	return es, `INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload, trace_id, available_at) VALUES ` +
		strings.Join(values, ",") + ` RETURNING id`
}

// insert runs a statement of rows on a connection.
func (m *model) insert(c *pgx.Conn, es []*modelEvent, sql string) {
	m.t.Helper()
	rows, _ := c.Query(m.t.Context(), sql)
	ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	m.must(err)
	for i, id := range ids {
		es[i].id = id
	}
}

func (m *model) commit(late bool, due, eventType string) {
	m.t.Helper()
	es, sql := m.rows(late, due, eventType)
	c := m.conn()
	m.insert(c, es, sql)
	m.must(c.Close(m.t.Context()))
	for _, e := range es {
		e.committed = true
	}
}

// begin inserts rows in a transaction that ends later.
func (m *model) begin(prepared bool) {
	m.t.Helper()
	es, sql := m.rows(true, "now()", "order.placed")
	c, name := m.conn(), fmt.Sprintf("prepared%d", len(m.events))
	m.must(run(m.t.Context(), c, `BEGIN`))
	m.insert(c, es, sql)
	if prepared {
		m.must(run(m.t.Context(), c, `PREPARE TRANSACTION '`+name+`'`))
	}
	m.open = append(m.open, func(commit bool) error {
		end := map[bool]string{true: "COMMIT", false: "ROLLBACK"}[commit]
		if prepared {
			end += " PREPARED '" + name + "'"
		}
		for _, e := range es {
			e.committed = commit
		}
		return errors.Join(run(m.t.Context(), c, end), c.Close(m.t.Context()))
	})
}

// end ends the oldest transaction that is open.
func (m *model) end(commit bool) bool {
	m.t.Helper()
	if len(m.open) == 0 {
		return false
	}
	end := m.open[0]
	m.open = m.open[1:]
	m.must(end(commit))
	return true
}

func (m *model) endAll() {
	m.t.Helper()
	for m.end(m.rng.IntN(2) == 0) {
	}
}

// stored are how often each event is in a stream.
func (m *model) stored() []int {
	times := make([]int, len(m.events))
	for _, x := range m.relays {
		eachHeader(m.t, m.nats.URL(), x.stream, func(_ uint64, h nats.Header) {
			n, err := strconv.Atoi(h.Get("ce-traceid"))
			m.must(err)
			if !isReplay(h) {
				times[n]++
			}
		})
	}
	return times
}

func isReplay(h nats.Header) bool { return strings.Contains(h.Get("Nats-Msg-Id"), "/replay-") }

// lacks are the events that a relay should have stored by now, and has not.
func (m *model) lacks(x *modelRelay) (lacking []int) {
	times := m.stored()
	for i, e := range m.events[1:] {
		isAway := m.away != nil && e.id >= m.away.from && e.id < m.away.to
		if e.committed && !e.fails && !isAway && x.covers(e) && times[i+1] == 0 && !m.isBehindAFailure(e) {
			lacking = append(lacking, i+1)
		}
	}
	return lacking
}

// isBehindAFailure: an event waits behind a failed one of its aggregate.
func (m *model) isBehindAFailure(e *modelEvent) bool {
	return slices.ContainsFunc(m.events[1:], func(f *modelEvent) bool { return f.fails && f.kind == e.kind && f.aggregate == e.aggregate })
}

func (m *model) settle(x *modelRelay) {
	m.t.Helper()
	var lacking []int
	defer func() {
		if !m.t.Failed() || len(lacking) == 0 {
			return
		}
		id := m.events[lacking[0]].id
		m.t.Logf("lacking %s, as event %d: %+v; %s", brief(lacking), lacking[0], *m.events[lacking[0]], m.query1(fmt.Sprintf(`SELECT concat_ws(' ',
			(SELECT json_agg(e) FROM outbox_messages e WHERE id = %[1]d), (SELECT json_agg(d) FROM outbox_deferred d WHERE id = %[1]d), (SELECT json_agg(j) FROM outbox_journal j WHERE ids @> %[1]d::bigint),
			(SELECT json_agg(k) FROM outbox_known k), (SELECT string_agg(concat_ws(' ', pid, application_name, state, wait_event, left(query, 100)), E'\n') FROM pg_stat_activity WHERE datname = current_database()))`, id)))
	}()
	eventually(m.t, "everything that "+x.slot+" has to deliver is stored", func() bool {
		if x.process.ended() {
			m.t.Fatalf("the relay ended: %s", x.process.logTail())
		}
		lacking = m.lacks(x)
		return len(lacking) == 0
	})
}

// check finds rows that are stored twice, and out of order.
func (m *model) check() {
	m.t.Helper()
	for i, n := range m.stored() {
		if n > 1 {
			m.t.Errorf("event %d is stored %d times: %+v", i, n, *m.events[i])
		}
		if n > 0 && !m.events[i].committed && m.events[i].id == 0 {
			m.t.Errorf("event %d is stored, and was rolled back", i)
		}
	}
	for _, x := range m.relays {
		last := map[string]int{}
		eachHeader(m.t, m.nats.URL(), x.stream, func(seq uint64, h nats.Header) {
			n, err := strconv.Atoi(h.Get("ce-traceid"))
			m.must(err)
			e := m.events[n]
			of := fmt.Sprint(e.kind, e.aggregate)
			if e.late || e.lost || isReplay(h) {
				return
			}
			if n < last[of] {
				m.t.Errorf("event %d follows %d in %s, message %d", n, last[of], x.stream, seq)
			}
			last[of] = max(last[of], n)
		})
	}
}

func (m *model) live(steps int) {
	m.t.Helper()
	for _, x := range m.relays {
		m.walpost(x, "migrate", "up")
		m.start(x)
	}
	for range steps {
		m.commit(false, "now()", "order.placed")
		a := modelActs[m.rng.IntN(len(modelActs))]
		m.t.Logf("%s (%d events)", a.name, len(m.events)-1)
		if a.do(m) {
			m.did[a.name]++
		}
		if m.rng.IntN(3) == 0 {
			m.settle(m.any())
			m.check()
		}
	}
	m.endAll()
	m.attach()
	for _, x := range m.relays {
		s, err := m.js().Stream(m.t.Context(), x.stream)
		m.must(err)
		cfg := s.CachedInfo().Config
		cfg.Subjects = []string{strings.ToLower(x.stream) + ".>"}
		_, err = m.js().UpdateStream(m.t.Context(), cfg)
		m.must(err)
	}
	for _, e := range m.events[1:] {
		e.fails = false
	}
	const known = `(SELECT * FROM outbox_known WHERE table_oid = 'outbox_messages'::regclass) k`
	m.exec(`UPDATE outbox_deferred SET available_at = now()`)
	eventually(m.t, "nothing is deferred, and no dead letter is left", func() bool {
		if m.count(`SELECT count(*) FROM outbox_messages_dlq`) > 0 { // a relay looks at its stream every three seconds
			m.walpost(m.relays[0], "dlq", "retry", "--all")
			return false
		}
		return m.count(`SELECT count(*) FROM outbox_deferred d JOIN `+known+` USING (outbox)`) == 0
	})
	for _, x := range m.relays {
		m.settle(x)
	}
	eventually(m.t, "each progress is at the last row", func() bool {
		return m.count(`SELECT count(*) FROM `+known+` WHERE `+testenv.Settled+` < (SELECT max(id) FROM outbox_messages) OR NOT isempty(`+testenv.Holes+`)`) == 0
	})
	m.check()
}
