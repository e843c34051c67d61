package relay_test

import (
	"context"
	"fmt"
	"hash/fnv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// rig is a database with the canonical tables, a NATS server, and the
// configuration of a relay between them.
type rig struct {
	t    *testing.T
	pg   *testenv.Postgres
	nats *testenv.NATS
	url  string
	cfg  relay.Config
	// asks are the connections of query1, acts those of exec: a statement may wait while questions are asked.
	asks, acts *asker
	counts     *counter
}

func newRig(t *testing.T, pg *testenv.Postgres) *rig {
	t.Helper()
	return newRigWith(t, pg, testenv.NewNATS(t, testenv.NATSOptions{Process: true}))
}

func newRigWith(t *testing.T, pg *testenv.Postgres, n *testenv.NATS) *rig {
	t.Helper()
	r := &rig{t: t, pg: pg, nats: n, asks: newAsker(), acts: newAsker(), counts: &counter{}}
	t.Cleanup(r.disconnect)
	t.Cleanup(r.counts.close)
	table := &outbox.Table{Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate}
	r.url = pg.CopyDB(t, "canonical", func(url string) { r.migrateDB(url, table) })
	r.exec("CREATE PUBLICATION theirs FOR ALL TABLES") // as another program makes one: what has no replica identity cannot be changed
	slot := "walpost_" + r.query1("SELECT current_database()::text")
	r.cfg = relay.Config{
		PostgresURL: r.url, Slot: slot, Publication: "walpost", Outboxes: []*outbox.Table{table},
		NATS:         jetstream.ConnConfig{URL: n.URL(), InboxPrefix: "_WALPOST." + slot},
		Stream:       jetstream.StreamConfig{Name: "EVENTS", Batching: batching(t)},
		CreateStream: true, Subject: "events.{event_type}",
		Window: 4096, WindowBytes: 32 << 20, DelayThreshold: time.Second,
	}
	t.Cleanup(func() { r.dropSlot(slot) })
	if marksInJournal {
		r.journal()
	}
	if trapped {
		r.trap()
	}
	return r
}

// batching spreads the tests over the ways to hand messages over: each has its own,
// and on another version of PostgreSQL another.
func batching(t *testing.T) jetstream.Batching {
	h := fnv.New32a()
	_, _ = h.Write([]byte(t.Name()))
	b := []jetstream.Batching{jetstream.BatchSingle, jetstream.BatchFast, jetstream.BatchAtomic}[h.Sum32()%3]
	t.Logf("publish.batch: %s", b)
	return b
}

func (r *rig) migrate(tables ...*outbox.Table) {
	r.t.Helper()
	r.migrateDB(r.url, tables...)
}

func (r *rig) migrateDB(url string, tables ...*outbox.Table) {
	r.t.Helper()
	cfg, err := pgx.ParseConfig(url)
	r.must(err)
	m := migrations.New(cfg, tables)
	defer m.Close()
	_, err = m.Up(r.t.Context(), migrations.Latest)
	r.must(err)
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

// conn is a connection of the test's own, closed with it.
func (r *rig) conn() *pgx.Conn {
	r.t.Helper()
	c, err := pgx.Connect(r.t.Context(), r.url)
	r.must(err)
	r.t.Cleanup(func() { _ = c.Close(context.Background()) })
	return c
}

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	r.must(r.acts.exec(r.t.Context(), r.url, sql, args...))
}

// disconnect closes the connections that are kept.
func (r *rig) disconnect() {
	r.asks.close()
	r.acts.close()
}

// query1 is the text of a query's only value.
func (r *rig) query1(sql string, args ...any) string {
	r.t.Helper()
	v, err := r.asks.value(r.t.Context(), r.url, sql, args...)
	r.must(err)
	return fmt.Sprint(v)
}

// asker keeps the connections of a test's small questions, many of which are
// asked until they have their answer, or of its statements.
type asker struct {
	mu    sync.Mutex
	conns map[string]*pgx.Conn // by URL
}

func newAsker() *asker { return &asker{conns: map[string]*pgx.Conn{}} }

// exec takes a connection of its own while another statement waits.
func (a *asker) exec(ctx context.Context, url, sql string, args ...any) error {
	if !a.mu.TryLock() {
		a = newAsker()
		defer a.close()
		a.mu.Lock()
	}
	defer a.mu.Unlock()
	c := a.conns[url]
	if c == nil || c.Ping(ctx) != nil {
		var err error
		if c, err = pgx.Connect(ctx, url); err != nil {
			return err
		}
		a.conns[url] = c
	}
	if len(args) > 0 {
		args = append([]any{pgx.QueryExecModeDescribeExec}, args...)
	}
	_, err := c.Exec(ctx, sql, args...)
	return err
}

// value asks a second time where the first one met a connection that had ended
// since the last question.
func (a *asker) value(ctx context.Context, url, sql string, args ...any) (v any, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for range 2 {
		c, old := a.conns[url]
		if !old {
			if c, err = pgx.Connect(ctx, url); err != nil {
				return nil, err
			}
			a.conns[url] = c
		}
		// Described each time: tests change tables.
		err = c.QueryRow(ctx, sql, append([]any{pgx.QueryExecModeDescribeExec}, args...)...).Scan(&v)
		if err == nil || !c.IsClosed() {
			return v, err
		}
		delete(a.conns, url)
		if !old {
			return v, err
		}
	}
	return v, err
}

func (a *asker) close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.conns {
		_ = c.Close(context.Background())
	}
	clear(a.conns)
}

func (r *rig) dropSlot(name string) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	for ctx.Err() == nil && r.pg.Pid() != 0 {
		if r.pg.Exec(ctx, "postgres", fmt.Sprintf(`SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = '%s'`, name)) == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// running is a relay at work.
type running struct {
	*relay.Relay
	rig      *rig
	logs     *observer.ObservedLogs
	registry *prometheus.Registry
	stop     context.CancelFunc
	done     chan struct{}
	err      error
	once     sync.Once
}

// start runs a relay until stop or the test's end.
func (r *rig) start() *running {
	r.t.Helper()
	core, logs := observer.New(zap.DebugLevel)
	log := zap.New(encoding{core})
	registry := prometheus.NewRegistry()
	rel, err := relay.New(r.cfg, log, registry)
	r.must(err)
	ctx, cancel := context.WithCancel(context.Background())
	x := &running{Relay: rel, rig: r, logs: logs, registry: registry, stop: cancel, done: make(chan struct{})}
	go func() {
		defer close(x.done)
		x.err = rel.Run(ctx)
	}()
	r.t.Cleanup(func() {
		x.halt()
		if r.t.Failed() {
			for _, e := range logs.All() {
				r.t.Logf("relay: %s %s %v", e.Level, e.Message, e.ContextMap())
			}
		}
	})
	return x
}

// encoding encodes the fields of an entry when it is written, as a log does. An observer keeps the values, and
// a test would read them while the relay changes them.
type encoding struct{ zapcore.Core }

func (c encoding) With(fields []zapcore.Field) zapcore.Core {
	return encoding{c.Core.With(fieldsAsWritten(fields))}
}

func (c encoding) Check(e zapcore.Entry, to *zapcore.CheckedEntry) *zapcore.CheckedEntry {
	return to.AddCore(e, c)
}

func (c encoding) Write(e zapcore.Entry, fields []zapcore.Field) error {
	return c.Core.Write(e, fieldsAsWritten(fields))
}

func fieldsAsWritten(fields []zapcore.Field) (all []zapcore.Field) {
	for _, f := range fields {
		to := zapcore.NewMapObjectEncoder()
		f.AddTo(to)
		for key, value := range to.Fields {
			all = append(all, zap.Any(key, value))
		}
	}
	return all
}

// halt stops the relay as SIGTERM would and waits for it.
func (x *running) halt() {
	x.rig.t.Helper()
	x.once.Do(func() {
		x.stop()
		select {
		case <-x.done:
		case <-time.After(testenv.Patience):
			x.rig.t.Error("the relay does not stop")
		}
	})
}

// ends waits until the relay has ended by itself.
func (x *running) ends() {
	x.rig.t.Helper()
	select {
	case <-x.done:
	case <-time.After(testenv.Patience):
		x.rig.t.Fatal("the relay has not ended by itself")
	}
}

func (x *running) streaming() *running {
	x.rig.t.Helper()
	eventually(x.rig.t, "the relay streams", func() bool { return x.Status().State == "streaming" })
	return x
}

// eventually waits for an effect, long enough for a machine that is busy with
// something else.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	pause := 5 * time.Millisecond
	for deadline := time.Now().Add(testenv.Patience); time.Now().Before(deadline); time.Sleep(pause) {
		if ok() {
			return
		}
		pause = min(pause*3/2, 50*time.Millisecond)
	}
	t.Fatalf("waited in vain: %s", what)
}

// stored reads the whole stream with its headers. Where an ordered consumer misses a heartbeat, another one takes its place. If that went
// back, a message would look as if it were stored twice.
func (r *rig) stored() []*natsjs.RawStreamMsg {
	r.t.Helper()
	return readStream(r.t, r.nats.URL(), "EVENTS")
}

func readStream(t *testing.T, url, name string) []*natsjs.RawStreamMsg {
	t.Helper()
	nc := testenv.ConnectNATS(t, url)
	defer nc.Close()
	js := testenv.JetStream(t, nc)
	s, err := js.Stream(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	var out []*natsjs.RawStreamMsg
	state := s.CachedInfo().State
	if state.Msgs == 0 {
		return nil
	}
	c, err := js.OrderedConsumer(t.Context(), name, natsjs.OrderedConsumerConfig{})
	if err != nil {
		t.Fatal(err)
	}
	it, err := c.Messages()
	if err != nil {
		t.Fatal(err)
	}
	defer it.Stop()
	for {
		m, err := it.Next(natsjs.NextContext(t.Context()))
		if err != nil {
			t.Fatal(err)
		}
		meta, _ := m.Metadata()
		if n := len(out); n > 0 && meta.Sequence.Stream <= out[n-1].Sequence {
			t.Fatalf("the reader got sequence %d after %d", meta.Sequence.Stream, out[n-1].Sequence)
		}
		out = append(out, &natsjs.RawStreamMsg{
			Subject: m.Subject(), Sequence: meta.Sequence.Stream, Header: m.Headers(), Data: m.Data(), Time: meta.Timestamp,
		})
		if meta.NumPending == 0 {
			return out
		}
	}
}

func (r *rig) storedCount() uint64 {
	r.t.Helper()
	return r.counts.messages(r.t.Context(), r.nats.URL())
}

// counter keeps the connection over which messages are counted.
type counter struct {
	mu sync.Mutex
	nc *nats.Conn
}

// messages returns 0 where the server, or the stream, is not there.
func (c *counter) messages(ctx context.Context, url string) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nc == nil || !c.nc.IsConnected() || c.nc.Opts.Url != url {
		c.disconnect()
		nc, err := nats.Connect(url, nats.NoReconnect())
		if err != nil {
			return 0
		}
		c.nc = nc
	}
	js, _ := natsjs.New(c.nc)
	s, err := js.Stream(ctx, "EVENTS")
	if err != nil {
		return 0
	}
	return s.CachedInfo().State.Msgs
}

func (c *counter) disconnect() {
	if c.nc != nil {
		c.nc.Close()
		c.nc = nil
	}
}

func (c *counter) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.disconnect()
}
