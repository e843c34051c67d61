package idempotency_test

import (
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/walpost/walpost/idempotency"
	"github.com/walpost/walpost/internal/testenv"
)

// A role that may create in public plants functions and operators with the names that the statements use. Each
// statement of the middleware runs beside them.
func TestPlantedNamesAreNotCalled(t *testing.T) {
	b := newBench(t)
	traps := testenv.SetTraps(t, b.url)
	c := b.serve(insert)
	c.want(c.post("/", "k", `{}`), 201, `{"id": 1}`, false)
	c.want(c.post("/", "k", `{}`), 201, `{"id": 1}`, true)

	started, end := make(chan bool), make(chan bool)
	finish := sync.OnceFunc(func() { close(end) })
	defer finish()
	wait := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		started <- true
		<-end
		fmt.Fprint(w, "done")
	})
	slow := b.serveHandler(idempotency.WithLease(b.pool, b.options(), 2*time.Second)(wait))
	answered := make(chan answer)
	go func() { answered <- slow.post("/slow", "k", `{}`) }()
	<-started
	began := b.text(`SELECT max(lease_until)::text FROM idempotency_keys`)
	b.waitFor(`SELECT count(*) FROM idempotency_keys WHERE lease_until > '`+began+`'`, "1")
	finish()
	c.want(<-answered, 200, "done", false)

	b.exec(`UPDATE idempotency_keys SET expires_at = now() - interval '1 second'`)
	c.want(c.post("/", "k", `{}`), 201, `{"id": 2}`, false)
	n, err := idempotency.Purge(t.Context(), b.pool, "")
	must(t, err)
	if n != 1 {
		t.Errorf("%d keys were deleted, want 1", n)
	}
	traps.Check(t)
}
