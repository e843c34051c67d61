package idempotency_test

import (
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/idempotency"
)

// BenchmarkRequest measures a request whose handler writes one row: alone, behind the middleware, and repeated. It
// reports the median in microseconds, because a commit may wait for the disk.
func BenchmarkRequest(b *testing.B) {
	rig := newBench(b)
	plain := func(w http.ResponseWriter, r *http.Request) {
		err := pgx.BeginFunc(r.Context(), rig.pool, func(tx pgx.Tx) error {
			return insertEffect(r.Context(), tx, w)
		})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
	keys := idempotency.Middleware(rig.pool, rig.options())
	var requests atomic.Int64
	for _, bm := range []struct {
		name    string
		handler http.Handler
		key     func() string
	}{
		{"plain", http.HandlerFunc(plain), func() string { return "" }},
		{"once", keys(http.HandlerFunc(insert)), func() string { return fmt.Sprint(requests.Add(1)) }},
		{"repeated", keys(http.HandlerFunc(insert)), func() string { return "k" }},
	} {
		b.Run(bm.name, func(b *testing.B) {
			c := rig.serveHandler(bm.handler)
			took := make([]time.Duration, b.N)
			for i := range took {
				start := time.Now()
				if a := c.post("/", bm.key(), `{"n": 1}`); a.status != http.StatusCreated {
					b.Fatalf("answer %d %s", a.status, a.body)
				}
				took[i] = time.Since(start)
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-us")
		})
	}
}
