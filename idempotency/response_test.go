package idempotency_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/idempotency"
	"github.com/walpost/walpost/internal/testenv"
)

// Failures are stored as well, and repetitions get them; those of RetryOn are not.
func TestFailuresAreStored(t *testing.T) {
	b := newBench(t)
	var calls atomic.Int32
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		var status int
		_, _ = fmt.Sscanf(r.URL.Path, "/%d", &status)
		w.WriteHeader(status)
		fmt.Fprint(w, calls.Add(1))
	}, func(o *idempotency.Options) { o.RetryOn = []int{429, 503} })
	n := 0
	for _, status := range []int{200, 302, 404, 500, 502} {
		n++
		path := fmt.Sprint("/", status)
		c.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		c.want(c.post(path, "k", ""), status, fmt.Sprint(n), false)
		c.want(c.post(path, "k", ""), status, fmt.Sprint(n), true)
	}
	for _, status := range []int{429, 503} {
		for range 2 {
			n++
			c.want(c.post(fmt.Sprint("/", status), "k", ""), status, fmt.Sprint(n), false)
		}
	}
	b.wantText("states", `SELECT string_agg(state || ' ' || status_code, ', ' ORDER BY status_code) FROM idempotency_keys`,
		"completed 200, completed 302, failed 404, failed 500, failed 502")
}

func TestRetryOnInATransaction(t *testing.T) {
	b := newBench(t)
	var calls atomic.Int32
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		if calls.Add(1) == 1 {
			w.WriteHeader(429)
			_, err := tx.Exec(ctx, `INSERT INTO effects DEFAULT VALUES`)
			return err
		}
		return insertEffect(ctx, tx, w)
	}), func(o *idempotency.Options) { o.RetryOn = []int{429} })
	c.want(c.post("/", "k", ""), 429, "", false)
	c.want(c.post("/", "k", ""), 201, "*", false)
	b.wantEffects(1)
}

// A panic without a transaction: what the handler has done is not known, so it is not done again.
func TestPanicOutsideATransaction(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "part")
		panic("oh")
	})
	for _, replayed := range []bool{false, true} {
		if a := c.post("/", "k", ""); a.status != 500 || a.replayed() != replayed || strings.Contains(a.body, "part") {
			t.Errorf("answer %+v", a)
		}
	}
	b.wantLog("handler panicked")
	b.wantRow("failed 500")

	c = b.serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	if a, err := c.try(t.Context(), "POST", "/", "k2", ""); err == nil {
		t.Errorf("answer %+v", a)
	}
	c.want(c.post("/", "k2", ""), 500, "*", true)
}

// A panic after the commit changes nothing of what was committed.
func TestPanicAfterCommit(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		insert(w, r)
		panic("oh")
	})
	c.want(c.post("/", "k", ""), 201, `{"id": 1}`, false)
	c.want(c.post("/", "k", ""), 201, `{"id": 1}`, true)
}

func TestReplayedHeaders(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		h.Set("Location", "/orders/1%2F2?x=ä")
		h.Add("X-Two", "1")
		h.Add("X-Two", "2")
		h["X-Bytes"] = []string{"\xff%41"}
		h.Set("Set-Cookie", "session=secret")
		h.Set("Date", "Mon, 01 Jan 2001 00:00:00 GMT")
		h.Set("Connection", "X-Hop")
		h.Set("X-Hop", "1")
		h.Set("Keep-Alive", "timeout=5")
		h.Set("Content-Length", "99")
		h["Content-Type"] = nil // no guess
		w.WriteHeader(201)
		h.Set("X-Late", "1")
		fmt.Fprint(w, "<html>")
	})
	first := c.post("/", "k", "")
	if c.want(first, 201, "<html>", false); first.header.Get("Set-Cookie") == "" || first.header.Get("X-Hop") == "" {
		t.Errorf("headers %v", first.header)
	}
	second := c.post("/", "k", "")
	c.want(second, 201, "<html>", true)
	for _, name := range []string{"Set-Cookie", "X-Hop", "Keep-Alive", "Content-Type", "X-Late"} {
		if got := second.header.Values(name); len(got) > 0 {
			t.Errorf("%s: %q", name, got)
		}
	}
	if second.header.Get("Date") == first.header.Get("Date") || second.header.Get("Content-Length") != "6" {
		t.Errorf("headers %v", second.header)
	}
	for _, name := range []string{"Location", "X-Two", "X-Bytes"} {
		if got, want := fmt.Sprintf("%q", second.header[name]), fmt.Sprintf("%q", first.header[name]); got != want || want == "[]" {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if text := b.text(`SELECT response_headers FROM idempotency_keys`); strings.Contains(text, "secret") {
		t.Errorf("stored headers %s", text)
	}
}

// jsonb holds no \u0000, and a failed cast would abort the effect. The raw body is replayed, whatever it is.
func TestBodiesThatJSONBDoesNotHold(t *testing.T) {
	b := newBench(t)
	var body atomic.Value
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		_, err := w.Write([]byte(body.Load().(string)))
		return errors.Join(err, tx.QueryRow(ctx, `INSERT INTO effects (note) VALUES ('x') RETURNING id`).Scan(new(int)))
	}))
	for i, text := range append([]string{
		`{"a":"\u0000"}`, `{"\u0000":1}`, `"\ud800"`, `"\udc00\ud800"`, "\x00", "\"\x00\"", "\xff", `"` + "\xff" + `"`, `NaN`, `[Infinity]`, `1e999999`, `1e-99999`, `{"a":1} {"b":2}`,
		`1e99999`, "0." + strings.Repeat("1", 20000), `{"a": 1.50, "b": "\ud83d\ude00", "a": "é"}`, ``, `text`, strings.Repeat("[", 200_000),
	}, known...) {
		body.Store(text)
		key := fmt.Sprint("k", i)
		c.want(c.post("/", key, ""), 200, text, false)
		c.want(c.post("/", key, ""), 200, text, true)
		stored := b.text(`SELECT (response IS NOT NULL)::text FROM idempotency_keys WHERE key = $1`, key)
		if want := fmt.Sprint(idempotency.Castable([]byte(text))); stored != want {
			t.Errorf("%.50q: stored as JSON %s, want %s", text, stored, want)
		}
		if idempotency.Castable([]byte(text)) && !json.Valid([]byte(text)) {
			t.Errorf("%.50q is not JSON", text)
		}
	}
}

// In a database of another encoding, text beyond ASCII may have no place.
func TestOtherServerEncodings(t *testing.T) {
	pg := testenv.SharedPostgres(t)
	b := newBench(t)
	original := b.text(`SELECT current_database()`)
	for _, encoding := range []string{"LATIN1", "SQL_ASCII", "KOI8R"} {
		name := original + "_" + strings.ToLower(encoding)
		must(t, pg.Exec(t.Context(), "postgres", "CREATE DATABASE "+name+" TEMPLATE template0 ENCODING "+encoding))
		makeTables(t, pg.URL(name))
		b.url = pg.URL(name)
		b.pool = b.newPool(b.url)
		c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
			w.Header().Set("X-Name", "жé€")
			fmt.Fprint(w, `{"a": "жé€"}`)
			_, err := tx.Exec(ctx, `INSERT INTO effects DEFAULT VALUES`)
			return err
		}))
		c.want(c.post("/ж", "k", "ж"), 200, `{"a": "жé€"}`, false)
		a := c.post("/ж", "k", "ж")
		if c.want(a, 200, `{"a": "жé€"}`, true); a.header.Get("X-Name") != "жé€" {
			t.Errorf("%s: headers %v", encoding, a.header)
		}
	}
}

func TestResponseLargerThanMaxResponse(t *testing.T) {
	b := newBench(t)
	limit := func(o *idempotency.Options) { o.MaxResponse = 10 }
	var got atomic.Value
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		err := insertEffect(ctx, tx, w)
		_, _ = fmt.Fprint(w, "0123456789")
		return err
	}, func(err error) { got.Store(err) }), limit)
	c.want(c.post("/", "k", ""), 418, "*", false)
	if err, _ := got.Load().(error); !errors.Is(err, idempotency.ErrTooLarge) {
		t.Errorf("error %v", got.Load())
	}
	b.wantEffects(0)

	// A handler that ignores the error has failed: 500.
	c = b.serve(func(_ http.ResponseWriter, r *http.Request) {
		_ = idempotency.Tx(r.Context(), func(_ pgx.Tx, w http.ResponseWriter) error {
			_, _ = fmt.Fprint(w, "0123456789 and more")
			return nil
		})
	}, limit)
	c.want(c.post("/", "k2", ""), 500, "*", false)
	c.want(c.post("/", "k2", ""), 500, "*", true)

	// Without a transaction it is sent, and a repetition says that it was not stored.
	c = b.serve(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		w.Header().Set("Etag", "x")
		w.Header().Set("Location", "/orders/1")
		w.WriteHeader(201)
		for range 5 {
			fmt.Fprint(w, "01234")
		}
	}, limit)
	c.want(c.post("/", "k3", ""), 201, strings.Repeat("01234", 5), false)
	a := c.post("/", "k3", "")
	if c.want(a, 201, "*", true); !strings.Contains(a.body, "too large to be stored") || a.header.Get("Location") != "/orders/1" ||
		a.header.Get("Content-Type") != "application/problem+json" || a.header.Get("Etag") != "" {
		t.Errorf("answer %+v", a)
	}
	// One of exactly the limit is stored.
	c = b.serve(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "0123456789") }, limit)
	c.want(c.post("/", "k4", ""), 200, "0123456789", false)
	c.want(c.post("/", "k4", ""), 200, "0123456789", true)

	// What was sent cannot be taken back: the connection is closed.
	c = b.serve(func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprint(w, "0123456789 and more")
		panic("oh")
	}, limit)
	if a, err := c.try(t.Context(), "POST", "/", "k5", ""); err == nil {
		t.Errorf("answer %+v", a)
	}
	c.want(c.post("/", "k5", ""), 500, "*", true)
}

// Nothing leaves before the response is stored: no informational response, no flush, no hijacked connection.
func TestResponsesWithoutBody(t *testing.T) {
	b := newBench(t)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		flush := http.NewResponseController(w).Flush()
		_, _, hijack := http.NewResponseController(w).Hijack()
		if !errors.Is(flush, http.ErrNotSupported) || !errors.Is(hijack, http.ErrNotSupported) {
			t.Errorf("flush: %v, hijack: %v", flush, hijack)
		}
		w.WriteHeader(103)
		w.WriteHeader(100)
		if r.URL.Path == "/nothing" {
			return
		}
		w.WriteHeader(204)
		w.WriteHeader(500)
		if _, err := w.Write([]byte("x")); !errors.Is(err, http.ErrBodyNotAllowed) {
			t.Errorf("a body beside 204: %v", err)
		}
	})
	for _, replayed := range []bool{false, true} {
		c.want(c.post("/", "k", ""), 204, "", replayed)
		c.want(c.post("/nothing", "k", ""), 200, "", replayed)
	}
	c = b.serve(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Length", "3")
		fmt.Fprint(w, "abc")
	}, func(o *idempotency.Options) { o.Methods = []string{"HEAD"} })
	for _, replayed := range []bool{false, true} {
		a, err := c.try(t.Context(), "HEAD", "/", "k", "")
		must(t, err)
		c.want(a, 200, "", replayed)
	}
	c = b.serve(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(42) })
	c.want(c.post("/", "k42", ""), 500, "*", false)
	b.wantLog("invalid WriteHeader code 42")
}
