package idempotency

import (
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// For tests only.
var (
	CanonicalJSON = canonicalJSON
	RequestHash   = requestHash
)

const MaxDepth = maxDepth

// WithLease is [Middleware] with another lease.
func WithLease(pool *pgxpool.Pool, o Options, lease time.Duration) func(http.Handler) http.Handler {
	return newMiddleware(pool, o, lease).wrap
}

// Castable reports whether the column response may hold a text.
func Castable(text []byte) bool {
	d, err := parseJSON(text)
	return err == nil && d.castable
}
