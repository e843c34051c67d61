package idempotency_test

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/idempotency"
)

// Handlers hold every connection of the pool, and the leases of others are renewed all the same: with one
// statement for all, on a connection beside the pool.
func TestLeasesAreRenewed(t *testing.T) {
	b := newBench(t, "pool_max_conns=1", "application_name=app")
	const lease = 2 * time.Second
	started, end := make(chan bool), make(chan bool)
	finish := sync.OnceFunc(func() { close(end) })
	defer finish()
	c := b.serveHandler(idempotency.WithLease(b.pool, b.options(), lease)(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		started <- true
		<-end
		fmt.Fprint(w, "done")
	})))
	var all sync.WaitGroup
	for i := range 5 {
		all.Go(func() { c.want(c.post("/", fmt.Sprint("k", i), ""), 200, "done", false) })
		<-started
	}
	conn, err := b.pool.Acquire(t.Context())
	must(t, err)
	began := b.text(`SELECT max(lease_until)::text FROM idempotency_keys`)
	for range 3 {
		b.waitFor(`SELECT count(*) FROM idempotency_keys WHERE lease_until > '`+began+`'`, "5")
		b.wantText("renewals", `SELECT count(DISTINCT xmin::text) FROM idempotency_keys`, "1")
		began = b.text(`SELECT max(lease_until)::text FROM idempotency_keys`)
	}
	// The pool's, the one beside it, and the test's.
	b.waitFor(`SELECT count(*) FROM pg_stat_activity WHERE application_name = 'app'`, "3")
	conn.Release()
	c.want(c.post("/", "k0", ""), 425, "*", false)
	finish()
	all.Wait()
	// The connection goes with the last handler.
	b.waitFor(`SELECT count(*) FROM pg_stat_activity WHERE application_name = 'app'`, "2")
}

// A handler is frozen past its lease. In a transaction it wakes without its key: it has no effect, and its client
// gets the other's response.
func TestFrozenBeforeItsTransaction(t *testing.T) {
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
	first.Go(func() { c.want(c.post("/", "k", ""), 201, `{"id": 1}`, true) })
	<-frozen
	b.endLeases()
	c.want(c.post("/", "k", ""), 201, `{"id": 1}`, false)
	wake <- true
	first.Wait()
	b.wantEffects(1)
}

// Frozen in its transaction it keeps its key: the row's lock outlives the lease.
func TestFrozenInItsTransaction(t *testing.T) {
	b := newBench(t)
	frozen, wake := make(chan bool), make(chan bool)
	c := b.serveHandler(idempotency.WithLease(b.pool, b.options(), 50*time.Millisecond)(transaction(
		func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
			frozen <- true
			<-wake
			return insertEffect(ctx, tx, w)
		})))
	var first sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ""), 201, `{"id": 1}`, false) })
	<-frozen
	b.waitFor(`SELECT (lease_until < now())::text FROM idempotency_keys`, "true")
	c.want(c.post("/", "k", ""), 425, "*", false)
	wake <- true
	first.Wait()
	b.wantEffects(1)
}

// Its key is taken over, though, if its connection was lost meanwhile. Then it cannot commit.
func TestFrozenWithoutItsConnection(t *testing.T) {
	b := newBench(t)
	frozen, wake := make(chan bool), make(chan bool)
	var calls atomic.Int32
	c := b.serve(transaction(func(ctx context.Context, tx pgx.Tx, w http.ResponseWriter) error {
		err := insertEffect(ctx, tx, w)
		if calls.Add(1) == 1 {
			frozen <- true
			<-wake
		}
		return err
	}))
	var first sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ""), 201, `{"id": 2}`, true) })
	<-frozen
	b.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`)
	b.waitFor(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle in transaction'`, "0")
	b.endLeases()
	c.want(c.post("/", "k", ""), 201, `{"id": 2}`, false)
	wake <- true
	first.Wait()
	b.wantEffects(1)
}

// Without a transaction a frozen handler may run twice. That is reported, and both clients get one response.
func TestFrozenOutsideATransaction(t *testing.T) {
	b := newBench(t)
	frozen, wake := make(chan bool), make(chan bool)
	var calls atomic.Int32
	c := b.serve(func(w http.ResponseWriter, _ *http.Request) {
		n := calls.Add(1)
		if n == 1 {
			frozen <- true
			<-wake
		}
		fmt.Fprint(w, n)
	})
	var first sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ""), 200, "2", true) })
	<-frozen
	b.endLeases()
	c.want(c.post("/", "k", ""), 200, "2", false)
	wake <- true
	first.Wait()
	b.wantLog("idempotency lease lost: the request may have been executed twice")
}

// A frozen handler wakes while the next one runs. It stores nothing: the key is the next one's.
func TestFrozenUntilTheNextRuns(t *testing.T) {
	b := newBench(t)
	began, goOn := make(chan int32), [3]chan bool{1: make(chan bool), 2: make(chan bool)}
	var calls atomic.Int32
	c := b.serve(func(w http.ResponseWriter, _ *http.Request) {
		n := calls.Add(1)
		began <- n
		<-goOn[n]
		fmt.Fprint(w, n)
	})
	var first, second sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ""), 200, "1", false) })
	<-began
	b.endLeases()
	second.Go(func() { c.want(c.post("/", "k", ""), 200, "2", false) })
	<-began
	goOn[1] <- true
	first.Wait()
	b.wantRow("pending")
	goOn[2] <- true
	second.Wait()
	c.want(c.post("/", "k", ""), 200, "2", true)
}

// The same with transactions: the first has no effect.
func TestFrozenTransactionUntilTheNextRuns(t *testing.T) {
	b := newBench(t)
	began, goOn := make(chan int32), [3]chan bool{1: make(chan bool), 2: make(chan bool)}
	var calls atomic.Int32
	c := b.serve(func(w http.ResponseWriter, r *http.Request) {
		n := calls.Add(1)
		began <- n
		<-goOn[n]
		insert(w, r)
	})
	var first, second sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", ""), 503, "*", false) })
	<-began
	b.endLeases()
	second.Go(func() { c.want(c.post("/", "k", ""), 201, "*", false) })
	<-began
	goOn[1] <- true
	first.Wait()
	b.wantEffects(0)
	goOn[2] <- true
	second.Wait()
	b.wantEffects(1)
}

// A lease is over, but the key came with another request: that is a conflict as before.
func TestLeaseOverForAnotherRequest(t *testing.T) {
	b := newBench(t)
	frozen, wake := make(chan bool), make(chan bool)
	c := b.serve(func(http.ResponseWriter, *http.Request) {
		frozen <- true
		<-wake
	})
	var first sync.WaitGroup
	first.Go(func() { c.want(c.post("/", "k", "1"), 200, "", false) })
	<-frozen
	b.endLeases()
	c.want(c.post("/", "k", "2"), 409, "*", false)
	wake <- true
	first.Wait()
}
