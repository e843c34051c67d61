package idempotency_test

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/idempotency"
	"github.com/walpost/walpost/internal/testenv"
)

// On every version: one execution, its replay, a conflict, a takeover.
func TestKeyOnEveryVersion(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		b := benchOn(t, pg)
		c := b.serve(insert)
		c.want(c.post("/orders", "k", `{"a": 1}`), 201, `{"id": 1}`, false)
		c.want(c.post("/orders", "k", `{"a":1}`), 201, `{"id": 1}`, true)
		c.want(c.post("/orders", "k", `{"a":2}`), 409, "*", false)
		b.wantRow("completed 201")
		b.wantText("response", `SELECT response->>'id' FROM idempotency_keys`, "1")

		b.exec(`INSERT INTO idempotency_keys (tenant_id, scope, key, request_hash, token, lease_until)
			SELECT tenant_id, scope, 'crashed', request_hash, gen_random_uuid(), now() + interval '1 minute' FROM idempotency_keys`)
		c.want(c.post("/orders", "crashed", `{"a":1}`), 425, "*", false)
		b.endLeases()
		c.want(c.post("/orders", "crashed", `{"a":1}`), 201, `{"id": 2}`, false)
		b.wantEffects(2)
	})
}

func TestOneExecutionOfConcurrentRequests(t *testing.T) {
	for _, settings := range [][]string{nil, {"default_transaction_isolation=repeatable%20read"}, {"default_transaction_isolation=serializable"}} {
		b := newBench(t, settings...)
		c := b.serve(insert, func(o *idempotency.Options) { o.Wait = testenv.Patience })
		for round := range 20 {
			var all sync.WaitGroup
			var first atomic.Int32
			want := fmt.Sprintf(`{"id": %d}`, round+1)
			for range 8 {
				all.Go(func() {
					a := c.post("/orders", fmt.Sprint("k", round), `{}`)
					if a.status != 201 || a.body != want {
						t.Errorf("answer %d %q, want %q", a.status, a.body, want)
					}
					if !a.replayed() {
						first.Add(1)
					}
				})
			}
			if all.Wait(); first.Load() != 1 {
				t.Errorf("%d requests were executed", first.Load())
			}
		}
		b.wantEffects(20)
	}
}

func TestOtherMethodsPass(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		err := idempotency.Tx(r.Context(), func(pgx.Tx, http.ResponseWriter) error { return nil })
		fmt.Fprint(w, r.Method, " ", err)
	})
	for _, method := range []string{"GET", "PUT", "DELETE"} {
		a, err := c.try(t.Context(), method, "/", "", "", "User: ")
		must(t, err)
		c.want(a, 200, method+" begin transaction: "+idempotency.ErrNoRequest.Error(), false)
	}
	b.wantRow("")
	a, err := c.try(t.Context(), "PATCH", "/", "", "")
	must(t, err)
	c.want(a, 400, "*", false)

	c = b.serve(insert, func(o *idempotency.Options) { o.Methods = []string{"PUT"} })
	for _, replayed := range []bool{false, true} {
		a, err := c.try(t.Context(), "PUT", "/", "k", "")
		must(t, err)
		c.want(a, 201, "*", replayed)
	}
}

func TestIdentityIsRequired(t *testing.T) {
	b := newBench(t)
	tenant := func(r *http.Request) (int64, bool) {
		return int64(len(r.Header.Get("Tenant"))), r.Header.Get("Tenant") != ""
	}
	c := b.serve(insert, func(o *idempotency.Options) { o.Tenant = tenant })
	c.want(c.post("/", "k", "", "Tenant: a", "User: "), 401, "*", false)
	c.want(c.post("/", "k", ""), 401, "*", false)
	c.want(c.post("/", "k", "", "Tenant: a"), 201, `{"id": 1}`, false)
	c.want(c.post("/", "k", "", "Tenant: bb"), 201, `{"id": 2}`, false)
	c.want(c.post("/", "k", "", "Tenant: bb", "User: bob"), 201, `{"id": 3}`, false)
	c.want(c.post("/", "k", "", "Tenant: a"), 201, `{"id": 1}`, true)
	b.wantText("tenants", `SELECT string_agg(tenant_id::text, ' ' ORDER BY created_at) FROM idempotency_keys`, "1 2 2")
}

func TestWrongOptionsPanic(t *testing.T) {
	b := newBench(t)
	for name, change := range map[string]func(*idempotency.Options){
		"Tenant":         func(o *idempotency.Options) { o.Tenant = nil },
		"Principal":      func(o *idempotency.Options) { o.Principal = nil },
		"TTL":            func(o *idempotency.Options) { o.TTL = time.Second },
		"negative":       func(o *idempotency.Options) { o.MaxBody = -1 },
		"RetryOn":        func(o *idempotency.Options) { o.RetryOn = []int{200} },
		"Profile":        func(o *idempotency.Options) { o.Profile = 7 },
		`name "a.b.c"`:   func(o *idempotency.Options) { o.Table = "a.b.c" },
		"another's resp": func(o *idempotency.Options) { *o = idempotency.Options{} },
	} {
		func() {
			defer func() {
				if text := fmt.Sprint(recover()); !strings.Contains(text, name) {
					t.Errorf("%s: %s", name, text)
				}
			}()
			o := b.options()
			change(&o)
			idempotency.Middleware(b.pool, o)
		}()
	}
}

func TestTableInAnotherSchema(t *testing.T) {
	b := newBench(t)
	b.exec(`CREATE SCHEMA "Shop"; ALTER TABLE idempotency_keys SET SCHEMA "Shop"`)
	c := b.serve(insert, func(o *idempotency.Options) { o.Table = "Shop.idempotency_keys" })
	c.want(c.post("/", "k", ""), 201, "*", false)
	c.want(c.post("/", "k", ""), 201, "*", true)
}

func TestScope(t *testing.T) {
	b := newBench(t)
	c := b.serve(insert)
	for i, path := range []string{
		"/orders/1/cancel", "/orders/2/cancel", "/orders/1%2Fcancel", "/orders/1/cancel?a=1", "/orders/1/cancel?a=1&a=2", "/orders/1/cancel?a=2&a=1",
		"/orders/1/cancel?a=1&b=2", "/orders/1/cancel?a=1;b=2", "/" + strings.Repeat("x", 5000), "/" + strings.Repeat("x", 5000) + "y",
	} {
		c.want(c.post(path, "k", ""), 201, fmt.Sprintf(`{"id": %d}`, i+1), false)
	}
	c.want(c.post("/orders/1/cancel?b=2&a=1", "k", ""), 201, `{"id": 7}`, true)
	a, err := c.try(t.Context(), "PATCH", "/orders/1/cancel", "k", "")
	must(t, err)
	c.want(a, 201, `{"id": 11}`, false)
	b.wantText("scope", `SELECT count(*) FROM idempotency_keys WHERE scope ~ '^POST /orders/2/cancel [0-9a-f]{64}$'`, "1")
}

// A handler in front that cuts a prefix off would make two resources one.
func TestScopeIsWhatTheClientSent(t *testing.T) {
	b := newBench(t)
	h := idempotency.Middleware(b.pool, b.options())(http.HandlerFunc(insert))
	mux := http.NewServeMux()
	mux.Handle("/orders/", http.StripPrefix("/orders", h))
	mux.Handle("/invoices/", http.StripPrefix("/invoices", h))
	c := b.serveHandler(mux)
	c.want(c.post("/orders/1", "k", ""), 201, `{"id": 1}`, false)
	c.want(c.post("/invoices/1", "k", ""), 201, `{"id": 2}`, false)
	c.want(c.post("/orders/1", "k", ""), 201, `{"id": 1}`, true)
}

func TestKeySyntax(t *testing.T) {
	b := newBench(t)
	c := b.serve(insert)
	c.want(c.post("/", strings.Repeat("k", 255), ""), 201, `{"id": 1}`, false)
	c.want(c.post("/", "Key", ""), 201, `{"id": 2}`, false)
	c.want(c.post("/", "key", ""), 201, `{"id": 3}`, false)
	c.want(c.post("/", `"8e03978e-40d5-43e8-bc93-6894a57f9324"`, ""), 201, `{"id": 4}`, false)
	for _, key := range []string{"", strings.Repeat("k", 256), "a b", "ä", "a\tb", "\xff"} {
		if a := c.post("/", key, ""); a.status != 400 || !strings.Contains(a.body, "Idempotency-Key") || a.header.Get("Content-Type") != "application/problem+json" {
			t.Errorf("key %q: %d %s", key, a.status, a.body)
		}
	}
	for _, second := range []string{"k1", "k2", ""} {
		r, err := http.NewRequest("POST", c.url, nil)
		must(t, err)
		r.Header.Set("User", "alice")
		r.Header.Add("Idempotency-Key", "k1")
		r.Header.Add("Idempotency-Key", second)
		w, err := c.http.Do(r)
		must(t, err)
		must(t, w.Body.Close())
		if w.StatusCode != 400 {
			t.Errorf("two headers: %d", w.StatusCode)
		}
	}
	b.wantEffects(4)
}

func TestOptionalKey(t *testing.T) {
	b := newBench(t)
	c := b.serve(insert, func(o *idempotency.Options) { o.Optional, o.MaxBody = true, 3 })
	c.want(c.post("/", "", "long body"), 201, `{"id": 1}`, false)
	c.want(c.post("/", "", "long body"), 201, `{"id": 2}`, false)
	c.want(c.post("/", "k", ""), 201, `{"id": 3}`, false)
	c.want(c.post("/", "k", ""), 201, `{"id": 3}`, true)
	b.wantRow("completed 201")

	// Nothing is sent before the commit there, either.
	b.exec(failAtCommit)
	c.want(c.post("/", "", ""), 500, "*", false)
	b.wantEffects(3)
}

func TestBodyIsReadAndBounded(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		fmt.Fprint(w, string(body), r.ContentLength, err)
	}, func(o *idempotency.Options) { o.MaxBody = 5 })
	c.want(c.post("/", "k", "12345"), 200, "123455 <nil>", false)
	c.want(c.post("/", "k2", "123456"), 413, "*", false)
	b.wantRow("completed 200")

	// A body that ends early is no request.
	r, err := http.NewRequest("POST", c.url, io.MultiReader(strings.NewReader("12"), failing{}))
	must(t, err)
	r.Header.Set("User", "alice")
	r.Header.Set("Idempotency-Key", "k3")
	if w, err := c.http.Do(r); err == nil {
		t.Errorf("status %d", w.StatusCode)
		_ = w.Body.Close()
	}
	b.wantRow("completed 200")
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

func TestRequestHash(t *testing.T) {
	hash := func(kind, body string) string { return hex.EncodeToString(idempotency.RequestHash(kind, []byte(body))) }
	sum := sha256.Sum256([]byte(`{"a":1,"b":[1.0,"\u00e9"]}`))
	if got := hash("application/json; charset=utf-8", ` {"b": [1.0, "é"], "a": 1}`); got != hex.EncodeToString(sum[:]) {
		t.Errorf("hash %s is not that of the canonical form", got)
	}
	part := func(boundary, name, content string) string {
		return "--" + boundary + "\r\nContent-Disposition: form-data; name=\"" + name + "\"; filename=\"f\"\r\n\r\n" + content + "\r\n--" + boundary + "--\r\n"
	}
	form := func(boundary string) string { return "multipart/form-data; boundary=" + boundary }
	same := [][4]string{
		{"application/vnd.api+json", `{"b":1,"a":2}`, "application/json", `{"a":2,"b":1}`},
		{form("AAA"), part("AAA", "x", "one"), form("BBB"), part("BBB", "x", "one")},
		{"application/json", `{broken`, "text/plain", `{broken`},
	}
	for _, s := range same {
		if hash(s[0], s[1]) != hash(s[2], s[3]) {
			t.Errorf("%q and %q differ", s[1], s[3])
		}
	}
	other := [][4]string{
		{"application/json", `{"a":1}`, "application/json", `{"a":1.0}`},
		{"application/json", `{"a":1}`, "text/plain", `{"a":1}`}, // no canonical form of text
		{"text/plain", `a b`, "text/plain", `a  b`},
		{"application/json", "\"\xff\"", "application/json", "\"\xfe\""},
		{form("AAA"), part("AAA", "x", "one"), form("AAA"), part("AAA", "x", "two")},
		{form("AAA"), part("AAA", "x", "one"), form("AAA"), part("AAA", "y", "one")},
		{form("AAA"), part("AAA", "x", "one")[:30], form("BBB"), part("BBB", "x", "one")[:30]},
		{"application/json", "", "application/json", "null"},
	}
	for _, o := range other {
		if hash(o[0], o[1]) == hash(o[2], o[3]) {
			t.Errorf("%q and %q are alike", o[1], o[3])
		}
	}
}

func TestOtherRequestAndRunningRequest(t *testing.T) {
	for profile, status := range map[idempotency.Profile][2]int{idempotency.Default: {409, 425}, idempotency.IETF: {422, 409}} {
		b := newBench(t)
		started, end := make(chan bool), make(chan bool)
		c := b.serve(func(w http.ResponseWriter, _ *http.Request) {
			started <- true
			<-end
			fmt.Fprint(w, "done")
		}, func(o *idempotency.Options) { o.Profile = profile })
		var first sync.WaitGroup
		first.Go(func() { c.want(c.post("/", "k", `{"a":1}`), 200, "done", false) })
		<-started
		a := c.post("/", "k", `{"a":1}`)
		if c.want(a, status[1], "*", false); a.header.Get("Retry-After") != "1" {
			t.Errorf("headers %v", a.header)
		}
		c.want(c.post("/", "k", `{"a":2}`), status[0], "*", false)
		end <- true
		first.Wait()
		c.want(c.post("/", "k", `{"a":2}`), status[0], "*", false)
		c.want(c.post("/", "k", `{"a":1}`), 200, "done", true)
	}
}

// A repetition that waits holds no connection: the pool has one, and the handler needs it.
func TestWaitHoldsNoConnection(t *testing.T) {
	b := newBench(t, "pool_max_conns=1")
	started, end := make(chan bool), make(chan bool)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		started <- true
		<-end
		insert(w, r)
	}, func(o *idempotency.Options) { o.Wait = testenv.Patience })
	var all sync.WaitGroup
	all.Go(func() { c.want(c.post("/", "k", ``), 201, `{"id": 1}`, false) })
	<-started
	for range 5 {
		all.Go(func() { c.want(c.post("/", "k", ``), 201, `{"id": 1}`, true) })
	}
	b.waitFor(`SELECT (xact_commit > 20)::text FROM pg_stat_database WHERE datname = current_database()`, "true")
	end <- true
	all.Wait()

	// A client that goes while it waits ends only its own request.
	ctx, cancel := context.WithCancel(t.Context())
	all.Go(func() { c.want(c.post("/", "k2", ``), 201, `{"id": 2}`, false) })
	<-started
	all.Go(func() {
		if _, err := c.try(ctx, "POST", "/", "k2", ""); err == nil {
			t.Error("the request was answered")
		}
	})
	cancel()
	end <- true
	all.Wait()
}

// The row of a handler in a transaction is locked, and then updated, for as long as it takes. Its lease ends
// meanwhile. A repetition neither takes the key over, nor waits with a connection.
func TestRepetitionsDoNotWaitForATransaction(t *testing.T) {
	b := newBench(t, "pool_max_conns=3")
	resume := b.holdCommits()
	c := b.serveHandler(idempotency.WithLease(b.pool, b.options(), 50*time.Millisecond)(http.HandlerFunc(insert)))
	var first sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ``), 201, `{"id": 1}`, false) })
	b.waitForHeldCommit()
	b.waitFor(`SELECT (lease_until < now())::text FROM idempotency_keys`, "true")
	for range 10 {
		c.want(c.post("/", "k", ``), 425, "*", false)
	}
	c.want(c.post("/", "k", `{}`), 409, "*", false)
	resume()
	first.Wait()
	c.want(c.post("/", "k", ``), 201, `{"id": 1}`, true)
	b.wantEffects(1)
}
