package idempotency

import (
	"encoding/json"
	"net/http"
)

// problem is an answer of the middleware itself, as RFC 9457 has it.
type problem struct {
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`

	retry bool // the same request may succeed a moment later
}

func newProblem(status int, detail string) *problem {
	return &problem{Title: http.StatusText(status), Status: status, Detail: detail}
}

// unavailable is for a request that was not executed, or of which that is not known.
func unavailable(detail string) *problem {
	p := newProblem(http.StatusServiceUnavailable, detail)
	p.retry = true
	return p
}

func (p *problem) send(w http.ResponseWriter) {
	if p.retry {
		w.Header().Set("Retry-After", "1")
	}
	w.Header().Set("Content-Type", "application/problem+json")
	w.WriteHeader(p.Status)
	body, _ := json.Marshal(p)
	_, _ = w.Write(body) // a client that has gone asks again
}

// Profile chooses the status codes for a key that cannot be served.
type Profile int

const (
	// Default: 409 Conflict where the key came with another request, 425 Too Early while the first request
	// is executed.
	Default Profile = iota
	// IETF has those of draft-ietf-httpapi-idempotency-key-header: 422 Unprocessable Content, and 409
	// Conflict.
	IETF
)

func (p Profile) otherRequest() *problem {
	status := http.StatusConflict
	if p == IETF {
		status = http.StatusUnprocessableEntity
	}
	return newProblem(status, "the key was used for another request")
}

func (p Profile) executing() *problem {
	status := http.StatusTooEarly
	if p == IETF {
		status = http.StatusConflict
	}
	answer := newProblem(status, "a request with this key is being executed")
	answer.retry = true
	return answer
}
