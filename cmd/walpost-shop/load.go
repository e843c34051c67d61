package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/walpost/walpost/internal/sleep"
)

// load is the clients: each places orders, one after the other, and changes every third. A client that has no
// answer, or one that tells it to, repeats its request with the same key.
type load struct {
	service string
	http    *http.Client
	next    atomic.Int64
	changed atomic.Int64
	retries atomic.Int64
	// waits: the consumers are behind, and new orders are to wait for them.
	waits atomic.Bool
}

func newLoad(service string) *load {
	return &load{service: service, http: &http.Client{Timeout: 10 * time.Second}}
}

func (l *load) run(ctx context.Context, o options) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var clients sync.WaitGroup
	for range o.clients {
		clients.Go(func() {
			for n := l.next.Add(1); n <= int64(o.orders); n = l.next.Add(1) {
				for l.waits.Load() && sleep.For(ctx, 20*time.Millisecond) {
				}
				if err := l.order(ctx, n); err != nil {
					cancel(err)
					return
				}
			}
		})
	}
	clients.Wait()
	return context.Cause(ctx)
}

func (l *load) order(ctx context.Context, n int64) error {
	var placed struct {
		PublicID string `json:"public_id"`
	}
	body := fmt.Sprintf(`{"client_ref": "c-%d", "total": %d}`, n, 100+n%1000)
	err := l.request(ctx, http.MethodPost, "/orders", body, &placed)
	if err != nil || n%3 > 0 {
		return err
	}
	l.changed.Add(1)
	return l.request(ctx, http.MethodPatch, "/orders/"+placed.PublicID, `{"total": 99}`, &placed)
}

// request repeats until there is a final answer.
func (l *load) request(ctx context.Context, method, path, body string, into any) error {
	key := rand.Text()
	for ; ; l.retries.Add(1) {
		answer, err := l.try(ctx, method, path, key, body)
		if err == nil {
			return json.Unmarshal(answer, into)
		}
		var final finalError
		if errors.As(err, &final) {
			return err
		}
		if !sleep.For(ctx, 50*time.Millisecond) {
			return context.Cause(ctx)
		}
	}
}

// finalError is an answer after which a repetition makes no sense.
type finalError struct{ error }

func (l *load) try(ctx context.Context, method, path, key, body string) ([]byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, l.service+path, strings.NewReader(body))
	if err != nil {
		return nil, err
	}
	r.Header.Set("Idempotency-Key", key)
	r.Header.Set("Content-Type", "application/json")
	w, err := l.http.Do(r)
	if err != nil {
		return nil, err
	}
	defer w.Body.Close() //nolint:errcheck // it was read
	answer, err := io.ReadAll(w.Body)
	switch {
	case err != nil:
		return nil, err
	case w.StatusCode == http.StatusCreated:
		return answer, nil
	case w.StatusCode == http.StatusTooEarly || w.StatusCode == http.StatusServiceUnavailable:
		return nil, fmt.Errorf("the service answers %s", w.Status)
	}
	return nil, finalError{fmt.Errorf("%s %s: the service answers %s: %s", method, path, w.Status, answer)}
}
