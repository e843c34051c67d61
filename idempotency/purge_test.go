package idempotency_test

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/idempotency"
)

const manyKeys = `INSERT INTO idempotency_keys (tenant_id, scope, key, request_hash, token, expires_at)
	SELECT 0, 's', 'k' || i, '', gen_random_uuid(), now() + (i - 2500) * interval '1 minute' FROM generate_series(1, 3000) i`

func TestPurge(t *testing.T) {
	b := newBench(t, "default_transaction_isolation=serializable")
	b.exec(manyKeys)
	b.exec(`UPDATE idempotency_keys SET lease_until = now() + interval '1 minute' WHERE key IN ('k1', 'k1001')`)
	b.exec(`UPDATE idempotency_keys SET lease_until = now() - interval '1 minute' WHERE key = 'k2'`)
	tx, err := b.pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), `SELECT FROM idempotency_keys WHERE key = 'k7' FOR UPDATE`)
	must(t, err)
	for _, want := range []int64{2497, 0} {
		if n, err := idempotency.Purge(t.Context(), b.pool, ""); n != want || err != nil {
			t.Errorf("%d keys deleted, %v, want %d", n, err, want)
		}
	}
	must(t, tx.Rollback(t.Context()))
	b.wantText("left", `SELECT string_agg(key, ' ' ORDER BY expires_at) FROM idempotency_keys WHERE expires_at < now()`, "k1 k7 k1001")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := idempotency.Purge(ctx, b.pool, "public.idempotency_keys"); !errors.Is(err, context.Canceled) {
		t.Errorf("after the context's end: %v", err)
	}
	if _, err := idempotency.Purge(t.Context(), b.pool, "no.such.table"); err == nil {
		t.Error("a wrong name is taken")
	}
}

// Keys expire while their requests are executed, in a transaction or with a lease: they stay.
func TestPurgeLeavesRunningRequests(t *testing.T) {
	b := newBench(t)
	started, end := make(chan bool), make(chan bool)
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/lease" {
			started <- true
			<-end
			w.WriteHeader(201)
			return
		}
		_ = idempotency.Tx(r.Context(), func(tx pgx.Tx, w http.ResponseWriter) error {
			started <- true
			<-end
			return insertEffect(r.Context(), tx, w)
		})
	})
	var all sync.WaitGroup
	for _, path := range []string{"/lease", "/tx"} {
		all.Go(func() { c.want(c.post(path, "k", ""), 201, "*", false) })
		<-started
		b.exec(`UPDATE idempotency_keys SET expires_at = now() - interval '1 hour' WHERE lease_until IS NOT NULL AND key = 'k' AND scope LIKE 'POST /lease %'`)
	}
	if n, err := idempotency.Purge(t.Context(), b.pool, ""); n != 0 || err != nil {
		t.Errorf("%d keys deleted, %v", n, err)
	}
	end <- true
	end <- true
	all.Wait()
	if n, err := idempotency.Purge(t.Context(), b.pool, ""); n != 1 || err != nil {
		t.Errorf("%d keys deleted, %v", n, err)
	}
}

// A claim treats a key that has expired as absent, whatever it came with, and one that is executed as taken.
func TestExpiredKeyIsAbsent(t *testing.T) {
	b := newBench(t)
	c := b.serve(insert)
	c.want(c.post("/", "k", "1"), 201, `{"id": 1}`, false)
	b.exec(`UPDATE idempotency_keys SET expires_at = now()`)
	c.want(c.post("/", "k", "2"), 201, `{"id": 2}`, false)
	c.want(c.post("/", "k", "2"), 201, `{"id": 2}`, true)
	b.wantText("expiry", `SELECT (expires_at > now() + interval '23 hours')::text FROM idempotency_keys`, "true")
	b.exec(`UPDATE idempotency_keys SET expires_at = now(), state = 'pending', status_code = NULL, lease_until = now() + interval '1 minute'`)
	c.want(c.post("/", "k", "2"), 425, "*", false)
}

// The row of a frozen handler is purged. In its transaction the handler notices, and has no effect.
func TestPurgedUnderAHandler(t *testing.T) {
	b := newBench(t)
	frozen, wake := make(chan bool), make(chan bool)
	var calls atomic.Int32
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		if calls.Add(1) == 1 {
			frozen <- true
			<-wake
		}
		insert(w, r)
	})
	var first sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ""), 503, "*", false) })
	<-frozen
	b.endLeases()
	b.exec(`UPDATE idempotency_keys SET expires_at = now() - interval '1 second'`)
	if n, err := idempotency.Purge(t.Context(), b.pool, ""); n != 1 || err != nil {
		t.Errorf("%d keys deleted, %v", n, err)
	}
	wake <- true
	first.Wait()
	c.want(c.post("/", "k", ""), 201, `{"id": 1}`, false)
	b.wantEffects(1)
}
