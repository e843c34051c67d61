package idempotency_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/idempotency"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/migrations"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		runChild(url)
	}
	if url := os.Getenv(soakURL); url != "" {
		runSoakServer(url)
	}
	testenv.Main(m)
}

// bench is a database with walpost's tables and one of effects, an application's pool, and its log.
type bench struct {
	t    testing.TB
	url  string
	pool *pgxpool.Pool
	log  *lockedBuffer
}

// newBench copies a database that was migrated once.
func newBench(t testing.TB, settings ...string) *bench {
	t.Helper()
	return benchOn(t, testenv.SharedPostgres(t), settings...)
}

func benchOn(t testing.TB, pg *testenv.Postgres, settings ...string) *bench {
	t.Helper()
	b := &bench{t: t, log: &lockedBuffer{}}
	b.url = pg.CopyDB(t, "idempotency", func(url string) { makeTables(t, url) })
	url := b.url
	for _, s := range settings {
		if url += "&" + s; !strings.HasPrefix(s, "pool_") { // that is no parameter of a single connection
			b.url += "&" + s
		}
	}
	b.pool = b.newPool(url)
	return b
}

func makeTables(t testing.TB, url string) {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	must(t, err)
	r := migrations.New(cfg, nil)
	_, err = r.Up(t.Context(), migrations.Latest)
	must(t, errors.Join(err, r.Close()))
	conn, err := pgx.Connect(t.Context(), url)
	must(t, err)
	_, err = conn.Exec(t.Context(), `CREATE TABLE effects (id BIGINT GENERATED ALWAYS AS IDENTITY, note TEXT)`)
	must(t, errors.Join(err, conn.Close(t.Context())))
}

func (b *bench) newPool(url string) *pgxpool.Pool {
	b.t.Helper()
	pool, err := pgxpool.New(context.Background(), url)
	must(b.t, err)
	b.t.Cleanup(pool.Close)
	return pool
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (b *bench) exec(sql string, args ...any) {
	b.t.Helper()
	conn, err := pgx.Connect(b.t.Context(), b.url)
	must(b.t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test ends anyway
	_, err = conn.Exec(b.t.Context(), sql, args...)
	must(b.t, err)
}

func (b *bench) text(sql string, args ...any) (s string) {
	b.t.Helper()
	conn, err := pgx.Connect(b.t.Context(), b.url)
	must(b.t, err)
	defer conn.Close(context.Background()) //nolint:errcheck // the test ends anyway
	must(b.t, conn.QueryRow(b.t.Context(), "SELECT coalesce(("+sql+")::text, '')", args...).Scan(&s))
	return s
}

func (b *bench) wantText(what, sql, want string) {
	b.t.Helper()
	if got := b.text(sql); got != want {
		b.t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func (b *bench) wantEffects(n int) {
	b.t.Helper()
	b.wantText("effects", `SELECT count(*) FROM effects`, fmt.Sprint(n))
}

// wantRow compares state and status of all keys.
func (b *bench) wantRow(want string) {
	b.t.Helper()
	b.wantText("keys", `SELECT string_agg(concat_ws(' ', state, status_code), ', ') FROM idempotency_keys`, want)
}

// waitFor waits until a query returns what is wanted.
func (b *bench) waitFor(sql, want string) {
	b.t.Helper()
	for start := time.Now(); b.text(sql) != want; time.Sleep(5 * time.Millisecond) {
		if time.Since(start) > testenv.Patience {
			b.t.Fatalf("%s is %q, want %q", sql, b.text(sql), want)
		}
	}
}

// endLeases makes every lease over, as time does.
func (b *bench) endLeases() {
	b.t.Helper()
	b.exec(`UPDATE idempotency_keys SET lease_until = now() - interval '1 second' WHERE lease_until IS NOT NULL`)
}

// options are those of the tests: the principal is what the header User says.
func (b *bench) options() idempotency.Options {
	return idempotency.Options{
		Tenant:    idempotency.SingleTenant,
		Principal: func(r *http.Request) string { return r.Header.Get("User") },
		Logger:    slog.New(slog.NewTextHandler(b.log, nil)),
	}
}

// serve runs a handler behind the middleware.
func (b *bench) serve(h http.HandlerFunc, change ...func(*idempotency.Options)) *client {
	b.t.Helper()
	o := b.options()
	for _, c := range change {
		c(&o)
	}
	return b.serveHandler(idempotency.Middleware(b.pool, o)(h))
}

func (b *bench) serveHandler(h http.Handler) *client {
	b.t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = slog.NewLogLogger(slog.NewTextHandler(b.log, nil), slog.LevelError)
	s.Start()
	b.t.Cleanup(s.Close)
	return &client{t: b.t, url: s.URL, http: s.Client()}
}

// client is one of the server's.
type client struct {
	t    testing.TB
	url  string
	http *http.Client
}

// answer is a response that was read.
type answer struct {
	status int
	body   string
	header http.Header
}

func (a answer) replayed() bool { return a.header.Get("Idempotency-Replayed") == "true" }

// post sends a JSON body. Further headers are "Name: value".
func (c *client) post(path, key, body string, headers ...string) answer {
	c.t.Helper()
	a, err := c.try(c.t.Context(), "POST", path, key, body, headers...)
	if err != nil {
		c.t.Error(err)
	}
	return a
}

func (c *client) try(ctx context.Context, method, path, key, body string, headers ...string) (a answer, err error) {
	r, err := http.NewRequestWithContext(ctx, method, c.url+path, strings.NewReader(body))
	if err != nil {
		return a, err
	}
	r.Header.Set("User", "alice")
	r.Header.Set("Content-Type", "application/json")
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if r.Header.Del(name); value != "" {
			r.Header.Set(name, value)
		}
	}
	w, err := c.http.Do(r)
	if err != nil {
		return a, err
	}
	defer w.Body.Close() //nolint:errcheck // it was read
	text, err := io.ReadAll(w.Body)
	return answer{status: w.StatusCode, body: string(text), header: w.Header}, err
}

func (c *client) want(a answer, status int, body string, replayed bool) {
	c.t.Helper()
	if a.status != status || body != "*" && a.body != body || a.replayed() != replayed {
		c.t.Errorf("answer %d %q, replayed %t; want %d %q, %t", a.status, a.body, a.replayed(), status, body, replayed)
	}
}

// insert is the handler of most tests: an effect and its number, in a transaction.
func insert(w http.ResponseWriter, r *http.Request) {
	err := idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
		return insertEffect(r.Context(), tx, w)
	})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

func insertEffect(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
	var id int64
	if err := tx.QueryRow(ctx, `INSERT INTO effects (note) VALUES ('x') RETURNING id`).Scan(&id); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	fmt.Fprintf(w, `{"id": %d}`, id)
	return nil
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

func (b *bench) wantLog(part string) {
	b.t.Helper()
	if !strings.Contains(b.log.String(), part) {
		b.t.Errorf("the log lacks %q:\n%s", part, b.log)
	}
}
