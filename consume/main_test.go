package consume_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		runChild(url)
	}
	testenv.Main(m)
}

// rig is a database with walpost's tables and one of effects, and a stream.
type rig struct {
	t       testing.TB
	url     string
	pool    *pgxpool.Pool
	nats    *testenv.NATS
	nc      *nats.Conn
	js      jetstream.JetStream
	log     *lockedBuffer
	metrics *prometheus.Registry
	sent    int
}

func newRig(t testing.TB) *rig {
	t.Helper()
	return rigOn(t, testenv.SharedPostgres(t), testenv.NATSOptions{})
}

func rigOn(t testing.TB, pg *testenv.Postgres, opts testenv.NATSOptions) *rig {
	t.Helper()
	r := &rig{t: t, url: copyDB(t, pg), nats: testenv.NewNATS(t, opts), log: &lockedBuffer{}, metrics: prometheus.NewRegistry()}
	r.pool = r.newPool(r.url)
	r.nc = testenv.ConnectNATS(r.t, r.nats.URL(), nats.MaxReconnects(-1), nats.ReconnectWait(50*time.Millisecond))
	r.js = testenv.JetStream(r.t, r.nc)
	r.createStream(nil)
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("consumers' log:\n%s", r.log)
		}
	})
	return r
}

// copyDB returns a database with the consumers' tables and one of effects.
func copyDB(t testing.TB, pg *testenv.Postgres) string {
	t.Helper()
	return pg.CopyDB(t, "consume", func(url string) {
		migrate(t, url)
		conn, err := pgx.Connect(t.Context(), url)
		if err != nil {
			t.Fatal(err)
		}
		_, err = conn.Exec(t.Context(), `CREATE TABLE effects (number BIGINT GENERATED ALWAYS AS IDENTITY,
			event_id TEXT NOT NULL, aggregate TEXT NOT NULL, attempt INTEGER NOT NULL, epoch BIGINT NOT NULL)`)
		if err := errors.Join(err, conn.Close(t.Context())); err != nil {
			t.Fatal(err)
		}
	})
}

func migrate(t testing.TB, url string) {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	m := migrations.New(cfg, nil, migrations.Consumer)
	_, err = m.Up(t.Context(), migrations.Latest)
	if err := errors.Join(err, m.Close()); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) newPool(url string) *pgxpool.Pool {
	r.t.Helper()
	pool, err := pgxpool.New(context.Background(), url)
	r.must(err)
	r.t.Cleanup(pool.Close)
	return pool
}

func (r *rig) must(err error) {
	r.t.Helper()
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) createStream(change func(*jetstream.StreamConfig)) {
	r.t.Helper()
	cfg := jetstream.StreamConfig{Name: "EVENTS", Subjects: []string{"events.>"}, AllowDirect: true}
	if change != nil {
		change(&cfg)
	}
	_, err := r.js.CreateOrUpdateStream(r.t.Context(), cfg)
	r.must(err)
}

// put stores events of type order.placed, a sequence of ids, in turn of so many aggregates.
func (r *rig) put(n, aggregates int) {
	r.t.Helper()
	eventually(r.t, func() string { return "the stream is there" }, func() bool {
		_, err := r.js.Stream(r.t.Context(), "EVENTS")
		return err == nil
	})
	var stored []jetstream.PubAckFuture
	for range n {
		r.sent++
		stored = append(stored, r.store(fmt.Sprint(r.sent), fmt.Sprintf("a%d", r.sent%aggregates), "order.placed"))
	}
	for _, s := range stored {
		select {
		case <-s.Ok():
		case err := <-s.Err():
			r.t.Fatalf("an event is not stored: %v", err)
		case <-time.After(testenv.Patience):
			r.t.Fatal("the events are not stored")
		}
	}
}

func message(id, aggregate, eventType string) *nats.Msg {
	m := nats.NewMsg("events." + eventType)
	m.Header = nats.Header{
		"ce-id": {id}, "ce-source": {"test"}, "ce-type": {eventType}, "ce-specversion": {"1.0"},
		"ce-aggregatetype": {"order"}, "ce-aggregateid": {aggregate}, "Nats-Msg-Id": {"test/" + id},
	}
	m.Data = []byte(`{"id":"` + id + `"}`)
	return m
}

func (r *rig) store(id, aggregate, eventType string) jetstream.PubAckFuture {
	r.t.Helper()
	stored, err := r.js.PublishMsgAsync(message(id, aggregate, eventType), jetstream.WithStallWait(time.Minute))
	r.must(err)
	return stored
}

func (r *rig) config() consume.Config {
	return consume.Config{
		Name: "test", Pool: r.pool, NATS: r.nc, Start: "all", Partitions: 4, Backoff: 50 * time.Millisecond,
		Logger: slog.New(slog.NewTextHandler(r.log, nil)), Metrics: r.metrics,
	}
}

const insertSQL = `INSERT INTO effects (event_id, aggregate, attempt, epoch) VALUES ($1, $2, $3, $4)`

// effect is the handler of most tests.
func effect(ctx context.Context, tx pgx.Tx, e consume.Event) error {
	_, err := tx.Exec(ctx, insertSQL, e.ID, e.AggregateID, e.Attempt, e.Epoch)
	return err
}

// running is a consumer that runs.
type running struct {
	r    *rig
	stop func()
	done chan struct{}
	err  error
}

func (r *rig) start(run func(context.Context) error) *running {
	r.t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	x := &running{r: r, stop: stop, done: make(chan struct{})}
	go func() {
		defer close(x.done)
		x.err = run(ctx)
	}()
	r.t.Cleanup(func() { x.halt() })
	return x
}

func (r *rig) run(cfg consume.Config, h func(context.Context, pgx.Tx, consume.Event) error) *running {
	r.t.Helper()
	return r.start(func(ctx context.Context) error { return consume.Run(ctx, cfg, h) })
}

func (x *running) halt() {
	x.r.t.Helper()
	x.stop()
	x.ends()
}

// ends waits for Run's return.
func (x *running) ends() {
	x.r.t.Helper()
	select {
	case <-x.done:
	case <-time.After(testenv.Patience):
		x.r.t.Fatal("Run does not return")
	}
}

// fails waits for an error that names all parts and has a hint.
func (x *running) fails(is error, parts ...string) {
	x.r.t.Helper()
	x.ends()
	if x.err == nil || is != nil && !errorsIs(x.err, is) || hint.Of(x.err) == "" {
		x.r.t.Fatalf("Run ended with %v (hint: %s), want %v", x.err, hint.Of(x.err), is)
	}
	for _, part := range parts {
		if !strings.Contains(x.err.Error(), part) {
			x.r.t.Errorf("the error %q does not say %q", x.err, part)
		}
	}
}

func (r *rig) exec(sql string, args ...any) {
	r.t.Helper()
	_, err := r.pool.Exec(r.t.Context(), sql, args...)
	r.must(err)
}

func (r *rig) text(sql string, args ...any) (s string) {
	r.t.Helper()
	r.must(r.pool.QueryRow(r.t.Context(), "SELECT coalesce(("+sql+")::text, '')", args...).Scan(&s))
	return s
}

// waitFor waits until a query, which has no error, returns what is wanted.
func (r *rig) waitFor(sql, want string) {
	r.t.Helper()
	eventually(r.t, func() string { return sql + " is " + r.text(sql) + ", want " + want }, func() bool { return r.text(sql) == want })
}

func eventually(t testing.TB, what func() string, ok func() bool) {
	t.Helper()
	for begun := time.Now(); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Since(begun) > testenv.Patience/5 {
			t.Fatalf("waited in vain: %s", what())
		}
	}
}

// effects waits for so many effects, and checks that each event has one, in the order of its aggregate.
func (r *rig) effects(n int) {
	r.t.Helper()
	r.waitFor(`SELECT count(*) FROM effects`, fmt.Sprint(n))
	r.ordered()
}

func (r *rig) ordered() {
	r.t.Helper()
	r.is(`SELECT count(*) FROM (SELECT FROM effects GROUP BY event_id HAVING count(*) > 1) twice`, "0")
	r.is(`SELECT string_agg(event_id, ' ') FROM (`+outOfOrder+`) x WHERE late`, "")
}

const outOfOrder = `SELECT event_id, event_id::bigint < max(event_id::bigint) OVER (PARTITION BY aggregate ORDER BY number) AS late FROM effects`

func (r *rig) is(sql, want string) {
	r.t.Helper()
	if got := r.text(sql); got != want {
		r.t.Errorf("%s is %q, want %q", sql, got, want)
	}
}

func (r *rig) logs(part string) {
	r.t.Helper()
	eventually(r.t, func() string { return "the log has " + part }, func() bool { return strings.Contains(r.log.String(), part) })
}

// lockedBuffer is a log that a test reads.
type lockedBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
