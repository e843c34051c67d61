package idempotency

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"time"
)

// Options configure [Middleware]. Tenant and Principal are required.
type Options struct {
	// Tenant tells whose data the request is about, and false where that is not known, which is answered with
	// 401. Keys of two tenants never meet. [SingleTenant] is for applications without tenants.
	Tenant func(*http.Request) (id int64, ok bool)
	// Principal is the authenticated user or client, or "", which is answered with 401.
	// A principal never gets a response that was made for another one.
	Principal func(*http.Request) string
	// Table is "table" or "schema.table"; without a schema it is in "public", whatever the search_path.
	// Default: idempotency_keys.
	Table string
	// Methods are the methods whose requests need a key. Requests with others go to the handler as they come.
	// Default: POST and PATCH.
	Methods []string
	// Optional: a request without a key is executed, and a repetition is executed again. Default: false,
	// it is answered with 400.
	Optional bool
	// Profile chooses the status codes. Default: [Default].
	Profile Profile
	// Wait is how long a repetition waits for the first request's response. It holds no connection meanwhile.
	// Default: 0, it is answered at once that the request is being executed.
	Wait time.Duration
	// Timeout bounds a handler: its context is done then. The client's disconnect does not end it.
	// Default: 30 s.
	Timeout time.Duration
	// TTL is how long after a request a repetition is recognized; 1 minute at least. Default: 24 h.
	TTL time.Duration
	// MaxBody bounds the request's body, in bytes: it is kept in memory. A larger one is answered with 413.
	// Default: 1 MiB.
	MaxBody int64
	// MaxResponse bounds the response's body that is stored, in bytes. [Tx] rolls back where it is larger;
	// without Tx it is sent and not stored, and a repetition says so. Default: 1 MiB.
	MaxResponse int
	// RetryOn are statuses that are not stored, such as 429 or 503: a repetition is executed again. They are
	// 400 or above. Default: none, failures are stored as well.
	RetryOn []int
	// Logger gets errors that no response shows. Default: [slog.Default].
	Logger *slog.Logger
}

// SingleTenant is the Tenant of an application that has none.
func SingleTenant(*http.Request) (int64, bool) { return 0, true }

const (
	defaultTimeout = 30 * time.Second
	defaultTTL     = 24 * time.Hour
	defaultSize    = 1 << 20
	minTTL         = time.Minute
)

// check returns the options with their defaults, or what is wrong with them.
func (o Options) check() (Options, error) {
	if o.Tenant == nil || o.Principal == nil {
		return o, errors.New("missing Tenant or Principal: without them one client gets another's response")
	}
	if len(o.Methods) == 0 {
		o.Methods = []string{http.MethodPost, http.MethodPatch}
	}
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	if o.TTL == 0 {
		o.TTL = defaultTTL
	}
	if o.MaxBody == 0 {
		o.MaxBody = defaultSize
	}
	if o.MaxResponse == 0 {
		o.MaxResponse = defaultSize
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	success := func(status int) bool { return status < 400 || status > 999 }
	switch {
	case o.TTL < minTTL:
		return o, fmt.Errorf("TTL %s is too short: want %s at least", o.TTL, minTTL)
	case o.Timeout < 0 || o.Wait < 0 || o.MaxBody < 0 || o.MaxResponse < 0:
		return o, errors.New("negative Timeout, Wait, MaxBody or MaxResponse")
	case slices.ContainsFunc(o.RetryOn, success):
		return o, fmt.Errorf("RetryOn %v: want statuses of 400 or above", o.RetryOn)
	case o.Profile != Default && o.Profile != IETF:
		return o, fmt.Errorf("unknown Profile %d", o.Profile)
	}
	return o, nil
}
