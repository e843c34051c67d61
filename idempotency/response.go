package idempotency

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"slices"
)

var (
	// ErrTooLarge means that a response in [Tx] is larger than Options.MaxResponse.
	ErrTooLarge = errors.New("response too large to be stored with the transaction")
	// ErrDecided means that the response was decided by [Tx]: nothing can be added to it.
	ErrDecided = errors.New("response was decided by the transaction")
)

// newResponse keeps a body of at most limit bytes. A larger one goes to w.
func newResponse(w http.ResponseWriter, limit int) *response {
	return &response{header: http.Header{}, limit: limit, stream: w}
}

// response is what a handler writes to. It keeps the response until it is stored. It has no Flush, no Hijack
// and no ReadFrom: nothing may leave before. It belongs to the handler's goroutine.
type response struct {
	header http.Header // what the handler sees and changes
	limit  int         // of the body, in bytes

	status  int         // 0 until it is decided
	sent    http.Header // as they were at that time
	body    []byte
	decided bool // by Tx
	large   bool // the body was larger than limit, and is not kept

	// stream is where a response goes that is too large to be kept. nil: there it is an error.
	stream http.ResponseWriter
}

func (r *response) Header() http.Header { return r.header }

// WriteHeader ignores informational responses (1xx): nothing is sent before the response is stored.
func (r *response) WriteHeader(status int) {
	if status < 100 || status > 999 { // net/http would panic when the response is sent, after the commit
		panic(fmt.Sprintf("invalid WriteHeader code %v", status))
	}
	if status < 200 || r.status != 0 || r.decided {
		return
	}
	r.status, r.sent = status, r.header.Clone()
	// Neither what is stored nor what is sent may contradict the body.
	r.sent.Del("Content-Length")
}

func (r *response) Write(b []byte) (int, error) {
	r.WriteHeader(http.StatusOK)
	switch {
	case r.decided:
		return 0, ErrDecided
	case r.status == http.StatusNoContent || r.status == http.StatusNotModified:
		return 0, http.ErrBodyNotAllowed
	case r.large && r.stream == nil:
		return 0, ErrTooLarge
	case r.large:
		return r.stream.Write(b)
	case len(r.body)+len(b) > r.limit:
		return r.overflow(b)
	}
	r.body = append(r.body, b...)
	return len(b), nil
}

// overflow gives up to keep the body.
func (r *response) overflow(b []byte) (int, error) {
	kept := r.body
	r.large, r.body = true, nil
	if r.stream == nil {
		return 0, ErrTooLarge
	}
	r.sendHeader(r.stream)
	if _, err := r.stream.Write(kept); err != nil {
		return 0, err
	}
	return r.stream.Write(b)
}

// streaming reports whether a part of the response was sent.
func (r *response) streaming() bool { return r.large && r.stream != nil }

func (r *response) sendHeader(w http.ResponseWriter) {
	maps.Copy(w.Header(), r.sent)
	w.WriteHeader(r.status)
}

// send sends what was not sent. A client that has gone asks again.
func (r *response) send(w http.ResponseWriter) {
	if r.streaming() {
		return
	}
	r.sendHeader(w)
	if len(r.body) > 0 {
		_, _ = w.Write(r.body)
	}
}

// inner is the response for a transaction. What the handler has set in the header goes with it.
func (r *response) inner() *response {
	return &response{header: r.header.Clone(), limit: r.limit}
}

// decide makes the response of the transaction the only one.
func (r *response) decide(inner *response) {
	inner.stream, inner.decided = r.stream, true
	*r = *inner
}

// fail replaces the response by an answer of the middleware. Where a part was sent, only the status that is
// stored changes.
func (r *response) fail(p *problem) {
	if r.streaming() {
		r.status = p.Status
		return
	}
	*r = *newResponse(r.stream, defaultSize)
	p.send(r)
}

// oneOf reports whether the response has one of the statuses.
func (r *response) oneOf(statuses []int) bool { return slices.Contains(statuses, r.status) }
