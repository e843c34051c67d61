package main

import (
	"net/http"
	"sync"
)

// provider is the payment service that the shop pays by. It charges a key once.
type provider struct {
	mu      sync.Mutex // guards below
	charges map[string]int
	calls   int
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := r.Header.Get("Idempotency-Key")
	if key == "" {
		http.Error(w, "no key", http.StatusBadRequest)
		return
	}
	p.calls++
	p.charges[key] = 1
}

// charged is how many keys were charged, and how many calls came.
func (p *provider) charged() (keys, calls int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.charges), p.calls
}
