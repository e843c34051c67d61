package idempotency_test

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
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

var (
	soakKeys   = flag.Int("keys", 15, "how many keys TestKilledUnderLoad uses")
	keysAtOnce = flag.Int("keys-at-once", 1, "how many of them at the same time")
)

const (
	soakURL   = "WALPOST_IDEMPOTENCY_SOAK"
	soakLease = 2 * time.Second
	// concurrent is how many clients repeat the request of a key at the same time.
	concurrent = 64
	// killOneIn is how often a server kills itself at a step.
	killOneIn = 40
)

// steps are where a server kills itself. Beside that it is killed from outside, at any time.
var steps = []string{"claimed", "locked", "effect", "committed", "answered"}

// runSoakServer serves, and kills itself at a random step of a random execution.
func runSoakServer(url string) {
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		panic(err)
	}
	h := func(w http.ResponseWriter, r *http.Request) {
		step := ""
		if rand.IntN(killOneIn) == 0 {
			step = steps[rand.IntN(len(steps))]
		}
		die := func(at string) {
			if at == step {
				_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
		}
		if step == "answered" {
			time.AfterFunc(time.Duration(rand.IntN(5))*time.Millisecond, func() { die("answered") })
		}
		die("claimed")
		err := idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
			die("locked")
			note := r.Header.Get(idempotency.Header)
			if _, err := tx.Exec(r.Context(), `INSERT INTO effects (note) VALUES ($1)`, note); err != nil {
				return err
			}
			fmt.Fprint(w, note)
			die("effect")
			return nil
		})
		die("committed")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
	o := idempotency.Options{Tenant: idempotency.SingleTenant, Principal: func(*http.Request) string { return "alice" }}
	s := httptest.NewServer(idempotency.WithLease(pool, o, soakLease)(http.HandlerFunc(h)))
	fmt.Println(s.URL)
	select {}
}

// server is a process that begins again whenever it dies.
type server struct {
	t     *testing.T
	b     *bench
	url   atomic.Pointer[string]
	child atomic.Pointer[os.Process]
	died  atomic.Int64
}

func (s *server) run(ctx context.Context) {
	for ctx.Err() == nil {
		child := exec.CommandContext(ctx, os.Args[0])
		child.Env = append(os.Environ(), soakURL+"="+s.b.url+"&pool_max_conns=8")
		child.WaitDelay = time.Second
		out, err := child.StdoutPipe()
		if err != nil || child.Start() != nil {
			s.t.Error("start server: ", err)
			return
		}
		line, _ := bufio.NewReader(out).ReadString('\n')
		line = strings.TrimSpace(line)
		s.url.Store(&line)
		s.child.Store(child.Process)
		_ = child.Wait()
		if ctx.Err() == nil {
			s.died.Add(1)
		}
	}
}

// Clients repeat each request at two servers until they are answered, while the servers are killed at every step.
// Each key has one effect in the end, each client the same answer, and no key stays blocked.
func TestKilledUnderLoad(t *testing.T) {
	b := newBench(t)
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer stop()
	servers := []*server{{t: t, b: b}, {t: t, b: b}}
	for _, s := range servers {
		running.Go(func() { s.run(ctx) })
		running.Go(func() { s.killNowAndThen(ctx) })
	}
	var slowest, repeated atomic.Int64
	transport := &http.Transport{MaxIdleConnsPerHost: concurrent}
	defer transport.CloseIdleConnections()
	request := func(key string, n int) {
		began := time.Now()
		c := &repeater{client: client{t: t, http: &http.Client{Transport: transport}}, servers: servers}
		c.repeat(ctx, key, n)
		repeated.Add(c.tries - 1)
		took := int64(time.Since(began))
		for s := slowest.Load(); took > s && !slowest.CompareAndSwap(s, took); s = slowest.Load() {
			continue
		}
	}
	var next atomic.Int64
	var keys sync.WaitGroup
	for range *keysAtOnce {
		keys.Go(func() {
			for i := next.Add(1); i <= int64(*soakKeys); i = next.Add(1) {
				var clients sync.WaitGroup
				for n := range concurrent {
					clients.Go(func() { request(fmt.Sprint("k", i), n) })
				}
				clients.Wait()
			}
		})
	}
	keys.Wait()
	b.wantText("keys with another number of effects than one",
		`SELECT count(*) FROM (SELECT note FROM effects GROUP BY note HAVING count(*) <> 1) e`, "0")
	b.wantText("effects", `SELECT count(DISTINCT note) FROM effects`, fmt.Sprint(*soakKeys))
	died := servers[0].died.Load() + servers[1].died.Load()
	if died == 0 {
		t.Error("no server died")
	}
	t.Logf("%d keys with %d clients each, %d repetitions, %d deaths; the lease is %s, the longest wait was %s",
		*soakKeys, concurrent, repeated.Load(), died, soakLease, time.Duration(slowest.Load()).Round(time.Millisecond))
}

func (s *server) killNowAndThen(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Duration(rand.IntN(2000)) * time.Millisecond):
		}
		if p := s.child.Load(); p != nil {
			_ = p.Kill() // it may have ended by itself
		}
	}
}

// repeater is a client that repeats its request with the same key, at one server or the other.
type repeater struct {
	client
	servers []*server
	tries   int64
}

func (c *repeater) repeat(ctx context.Context, key string, n int) {
	pause := 10 * time.Millisecond
	for start := time.Now(); ctx.Err() == nil; time.Sleep(pause) {
		pause = min(2*pause, 320*time.Millisecond)
		if time.Since(start) > testenv.Patience {
			c.t.Errorf("%s has no answer after %d tries", key, c.tries)
			return
		}
		url := c.servers[(n+int(c.tries))%len(c.servers)].url.Load()
		c.tries++
		if url == nil || *url == "" {
			continue
		}
		c.url = *url
		a, err := c.try(ctx, http.MethodPost, "/", key, "{}")
		switch {
		case err != nil || a.status == http.StatusTooEarly || a.status == http.StatusServiceUnavailable:
			continue
		case a.status != http.StatusOK || a.body != key:
			c.t.Errorf("%s is answered with %d %q", key, a.status, a.body)
		}
		return
	}
}
