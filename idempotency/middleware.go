package idempotency

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/internal/sleep"
)

// middleware is what all requests share. Its fields do not change.
type middleware struct {
	Options
	pool   *pgxpool.Pool
	store  *store
	leases *leases
}

// Middleware executes a request with an Idempotency-Key once, and answers its repetitions with the stored
// response and the header Idempotency-Replayed: true. Keys and responses are in the table that
// `walpost migrate up` creates.
//
// What is guaranteed depends on the handler:
//
//   - The effect of a handler that works in [Tx] is committed at most once, together with the response,
//     whatever crashes. A client that repeats its request until it gets an answer has it exactly once.
//   - Any other handler runs once unless its process dies, or is frozen for longer than its lease (30
//     seconds, renewed while the process works). It may then run again.
//
// The key belongs to the tenant, the principal, the method, the path and the query. A repetition needs the
// same body, too; JSON may be written in another way. Another request with the key is answered with 409, one
// that comes while the first is executed with 425 and Retry-After, and one whose outcome is not known with
// 503 and Retry-After: the client repeats it with the same key.
//
// A response is stored whatever its status. It is not stored, and the key is free again, where the middleware
// answers 503 or the status is one of Options.RetryOn. The handler's context does not end when the client
// disconnects. The handler's ResponseWriter keeps the response until it is stored: it has neither Flush nor
// Hijack, and drops informational responses (1xx). Middleware that changes responses, such as compression,
// belongs in front of this one; middleware that authenticates, too.
//
// It panics where the options are wrong.
func Middleware(pool *pgxpool.Pool, options Options) func(http.Handler) http.Handler {
	return newMiddleware(pool, options, leaseTime).wrap
}

func newMiddleware(pool *pgxpool.Pool, options Options, lease time.Duration) *middleware {
	options, err := options.check()
	if err != nil {
		panic("idempotency: check options: " + err.Error())
	}
	table, err := quoteTable(options.Table)
	if err != nil {
		panic("idempotency: check options: " + err.Error())
	}
	s := &store{db: pool, table: table, lease: lease, ttl: options.TTL}
	return &middleware{Options: options, pool: pool, store: s, leases: newLeases(pool, s, options.Logger)}
}

func (m *middleware) wrap(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !slices.Contains(m.Methods, r.Method) {
			next.ServeHTTP(w, r)
			return
		}
		c, refused := m.newClaim(w, r)
		if refused != nil {
			refused.send(w)
			return
		}
		if c != nil && !m.acquire(w, r, c) {
			return
		}
		x := &execution{middleware: m, claim: c, response: newResponse(w, m.MaxResponse)}
		x.serve(w, r, next)
	})
}

// newClaim identifies the request. The claim is nil where the request needs no key and has none.
func (m *middleware) newClaim(w http.ResponseWriter, r *http.Request) (*claim, *problem) {
	tenant, ok := m.Tenant(r)
	principal := m.Principal(r)
	if !ok || principal == "" {
		return nil, newProblem(http.StatusUnauthorized, "the request has no identity")
	}
	key, refused := readKey(r)
	if refused != nil {
		return nil, refused
	}
	if key == "" && !m.Optional {
		return nil, newProblem(http.StatusBadRequest, "the request needs an Idempotency-Key header")
	}
	if key == "" {
		return nil, nil
	}
	body, refused := m.readBody(w, r)
	if refused != nil {
		return nil, refused
	}
	hash := requestHash(r.Header.Get("Content-Type"), body)
	return &claim{tenant: tenant, scope: scopeOf(principal, r), key: key, hash: hash, token: newToken()}, nil
}

// readBody reads the whole body, and leaves a copy to the handler.
func (m *middleware) readBody(w http.ResponseWriter, r *http.Request) ([]byte, *problem) {
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, m.MaxBody))
	var large *http.MaxBytesError
	if errors.As(err, &large) {
		return nil, newProblem(http.StatusRequestEntityTooLarge, "the request's body is too large")
	}
	if err != nil {
		return nil, newProblem(http.StatusBadRequest, "the request's body ended early")
	}
	r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	return body, nil
}

const (
	waitFirst = 20 * time.Millisecond
	waitMost  = 500 * time.Millisecond
)

// acquire returns true where the request is to be executed. Else it has answered it.
func (m *middleware) acquire(w http.ResponseWriter, r *http.Request, c *claim) bool {
	deadline := time.Now().Add(m.Wait)
	for pause := waitFirst; ; pause = min(2*pause, waitMost) {
		owned, found, err := m.store.acquire(r.Context(), c)
		switch {
		case err != nil:
			m.Logger.ErrorContext(r.Context(), "claim idempotency key", "error", err)
			unavailable("the key cannot be looked up now").send(w)
		case owned:
			return true
		case found != nil && !found.sameHash:
			m.Profile.otherRequest().send(w)
		case found != nil && found.state != "pending":
			found.replay(w)
		case time.Now().Add(pause).Before(deadline) && sleep.For(r.Context(), pause):
			continue
		default:
			m.Profile.executing().send(w)
		}
		return false
	}
}
