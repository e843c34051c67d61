package idempotency_test

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/idempotency"
	"github.com/walpost/walpost/internal/testenv"
)

// The connection ends at each step of a handler in a transaction. Whatever the client is told, a repetition until it
// gets an answer makes exactly one effect.
func TestTerminatedAtEachStep(t *testing.T) {
	b := newBench(t)
	kill := func(ctx context.Context, tx pgx.Tx) {
		_, _ = tx.Exec(ctx, `SELECT pg_terminate_backend(pg_backend_pid())`)
	}
	for step, f := range []func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error{
		func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error { // before the effect
			kill(ctx, tx)
			return insertEffect(ctx, tx, w)
		},
		func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error { // between effect and response
			_, err := tx.Exec(ctx, `INSERT INTO effects DEFAULT VALUES`)
			kill(ctx, tx)
			w.WriteHeader(201)
			return err
		},
		func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error { // before the response is stored
			err := insertEffect(ctx, tx, w)
			kill(ctx, tx)
			return err
		},
		func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error { // while it is stored
			_, err := tx.Exec(ctx, `CREATE FUNCTION pg_temp.die() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); RETURN NEW; END $$`)
			if err == nil {
				_, err = tx.Exec(ctx, `CREATE TRIGGER die BEFORE UPDATE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION pg_temp.die()`)
			}
			if err != nil {
				return err
			}
			return insertEffect(ctx, tx, w)
		},
		func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error { // in the commit
			_, err := tx.Exec(ctx, `CREATE FUNCTION pg_temp.die() RETURNS trigger LANGUAGE plpgsql AS $$
				BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); RETURN NEW; END $$`)
			if err == nil {
				_, err = tx.Exec(ctx, `CREATE CONSTRAINT TRIGGER die AFTER INSERT ON effects DEFERRABLE INITIALLY DEFERRED
					FOR EACH ROW EXECUTE FUNCTION pg_temp.die()`)
			}
			if err != nil {
				return err
			}
			return insertEffect(ctx, tx, w)
		},
	} {
		var calls atomic.Int32
		c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
			if calls.Add(1) == 1 {
				return f(ctx, tx, w)
			}
			return insertEffect(ctx, tx, w)
		}))
		key := fmt.Sprint("step", step)
		c.want(c.post("/", key, ""), 503, "*", false)
		b.wantEffects(step)
		a := c.post("/", key, "")
		c.want(a, 201, "*", false)
		c.want(c.post("/", key, ""), 201, a.body, true)
		b.wantEffects(step + 1)
	}
}

// The reply of a COMMIT is lost. The row decides what the client is told: that it was committed, or that it was
// not. It is waited for.
func TestLostReplyOfCommit(t *testing.T) {
	for _, committed := range []bool{true, false} {
		b := newBench(t)
		proxy := testenv.NewProxy(t, fmt.Sprint("127.0.0.1:", testenv.SharedPostgres(t).Port()))
		direct := b.pool
		b.pool = b.newPool(strings.Replace(b.url, fmt.Sprint("127.0.0.1:", testenv.SharedPostgres(t).Port()), proxy.Addr(), 1))
		resume := b.holdCommits()
		c := b.serve(insert)
		var first sync.WaitGroup
		first.Go(func() {
			a := c.post("/", "k", "")
			if committed {
				c.want(a, 201, `{"id": 1}`, false)
			} else {
				c.want(a, 503, "*", false)
			}
		})
		b.waitForHeldCommit()
		proxy.Drop()
		// The middleware asks for the row, and waits for the transaction that has it.
		b.waitFor(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE 'DELETE%'`, "1")
		if committed {
			resume()
		} else {
			b.killCommit()
		}
		first.Wait()
		resume()
		b.pool = direct
		a := b.serve(insert).post("/", "k", "")
		c.want(a, 201, "*", committed)
		b.wantEffects(1)
	}
}

// While the outcome of the COMMIT is not known, the client is told to repeat the request, and its key is kept.
func TestOutcomeNotKnown(t *testing.T) {
	b := newBench(t)
	proxy := testenv.NewProxy(t, fmt.Sprint("127.0.0.1:", testenv.SharedPostgres(t).Port()))
	direct := b.pool
	b.pool = b.newPool(strings.Replace(b.url, fmt.Sprint("127.0.0.1:", testenv.SharedPostgres(t).Port()), proxy.Addr(), 1))
	resume := b.holdCommits()
	c := b.serve(insert)
	var first sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ""), 503, "*", false) })
	b.waitForHeldCommit()
	proxy.Cut()
	first.Wait()
	b.wantRow("pending")
	resume()
	b.waitFor(`SELECT state FROM idempotency_keys`, "completed")
	b.pool = direct
	c.want(b.serve(insert).post("/", "k", ""), 201, `{"id": 1}`, true)
	b.wantEffects(1)
}

// The database is away before, or comes back without the row.
func TestDatabaseIsAway(t *testing.T) {
	b := newBench(t)
	proxy := testenv.NewProxy(t, fmt.Sprint("127.0.0.1:", testenv.SharedPostgres(t).Port()))
	b.pool = b.newPool(strings.Replace(b.url, fmt.Sprint("127.0.0.1:", testenv.SharedPostgres(t).Port()), proxy.Addr(), 1))
	var calls atomic.Int32
	c := b.serve(func(w http.ResponseWriter, _ *http.Request) {
		if calls.Add(1) == 1 {
			proxy.Cut()
		}
		fmt.Fprint(w, "done")
	})
	// Without Tx the effect has happened, and the client is told so, though it could not be stored.
	c.want(c.post("/", "k", ""), 200, "done", false)
	b.wantLog("store response")
	a := c.post("/", "k2", "")
	if c.want(a, 503, "*", false); a.header.Get("Retry-After") != "1" {
		t.Errorf("headers %v", a.header)
	}
	proxy.Resume()
	for start := time.Now(); a.status == 503 && time.Since(start) < testenv.Patience; { // the pool has broken connections
		a = c.post("/", "k2", "")
	}
	c.want(a, 200, "done", false)
	b.wantText("key", `SELECT state FROM idempotency_keys WHERE key = 'k'`, "pending")
}

const (
	childURL  = "WALPOST_IDEMPOTENCY_CHILD"
	childStep = "WALPOST_IDEMPOTENCY_STEP"
)

// runChild is the process that gets killed: it serves, says where, and kills itself at a step of its first request.
func runChild(url string) {
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		panic(err)
	}
	step := os.Getenv(childStep)
	die := func(at string) {
		if at == step {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
	}
	h := func(w http.ResponseWriter, r *http.Request) {
		die("before-Tx")
		err := idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
			die("locked")
			err := insertEffect(r.Context(), tx, w)
			die("effect")
			return err
		})
		die("committed")
		if err != nil {
			http.Error(w, err.Error(), 500)
		}
	}
	o := idempotency.Options{Tenant: idempotency.SingleTenant, Principal: func(r *http.Request) string { return r.Header.Get("User") }}
	s := httptest.NewServer(idempotency.Middleware(pool, o)(http.HandlerFunc(h)))
	fmt.Println(s.URL)
	select {}
}

// The process is killed at each step. A repetition at another process makes exactly one effect, as soon as the
// lease is over.
func TestKilledAtEachStep(t *testing.T) {
	b := newBench(t)
	c := b.serve(insert)
	for i, step := range []string{"before-Tx", "locked", "effect", "committed"} {
		child := exec.Command(os.Args[0])
		child.Env = append(os.Environ(), childURL+"="+b.url, childStep+"="+step)
		out, err := child.StdoutPipe()
		must(t, err)
		must(t, child.Start())
		line, err := bufio.NewReader(out).ReadString('\n')
		must(t, err)
		other := &client{t: t, url: strings.TrimSpace(line), http: c.http}
		if a, err := other.try(t.Context(), "POST", "/", step, ""); err == nil {
			t.Errorf("%s: answer %d %s", step, a.status, a.body)
		}
		_ = child.Wait()
		b.waitFor(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL`, "0")
		if step != "committed" {
			c.want(c.post("/", step, ""), 425, "*", false)
			b.endLeases()
		}
		c.want(c.post("/", step, ""), 201, "*", step == "committed")
		b.wantEffects(i + 1)
	}
}

// The client goes away. Its request is executed to the end, and the repetition gets the response.
func TestClientDisconnects(t *testing.T) {
	for _, inTx := range []bool{true, false} {
		b := newBench(t)
		started, end := make(chan bool), make(chan error, 1)
		h := idempotency.Middleware(b.pool, b.options())(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			started <- true
			<-started
			end <- r.Context().Err()
			if inTx {
				insert(w, r)
				return
			}
			fmt.Fprint(w, `{"id": 1}`)
		}))
		gone := make(chan (<-chan struct{}), 2)
		c := b.serveHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			gone <- r.Context().Done()
			h.ServeHTTP(w, r)
		}))
		ctx, cancel := context.WithCancel(t.Context())
		var first sync.WaitGroup
		first.Go(func() {
			if _, err := c.try(ctx, "POST", "/", "k", ""); err == nil {
				t.Error("the request was answered")
			}
		})
		<-started
		cancel()
		first.Wait()
		<-<-gone // the server has noticed
		started <- true
		if err := <-end; err != nil {
			t.Errorf("the handler's context: %v", err)
		}
		b.waitFor(`SELECT state FROM idempotency_keys`, "completed")
		a := c.post("/", "k", "")
		c.want(a, a.status, `{"id": 1}`, true)
	}
}
