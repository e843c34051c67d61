package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/console"
	"github.com/walpost/walpost/internal/hint"
)

// Health is what the HTTP server asks the relay. Its methods are called from several goroutines and answer at
// once: they report what is known and ask no other server.
type Health interface {
	// Live is nil while a restart of the process would not help.
	Live() error
	// Ready is nil while the relay does its work or stands by for the one that does.
	Ready() error
	// Status is shown as JSON.
	Status() any
}

// A probe or a scrape is done in milliseconds. A client that takes longer is neither.
const (
	httpTimeout  = 10 * time.Second
	httpShutdown = 3 * time.Second
)

// httpServer serves /metrics, /healthz, /readyz and /status, and the console where there is one. Without an
// address it does nothing.
type httpServer struct {
	address string
	server  *http.Server
	mux     *http.ServeMux
	ln      net.Listener
	ui      *console.Console
}

func newHTTPServer(address string, metrics prometheus.Gatherer, health Health, log *zap.Logger) *httpServer {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{
		Timeout: httpTimeout, EnableOpenMetrics: true, // which has exemplars
	}))
	mux.Handle("GET /healthz", probe(health.Live))
	mux.Handle("GET /readyz", probe(health.Ready))
	mux.Handle("GET /status", statusHandler(health))
	s := &httpServer{address: address, server: newServer(mux, log), mux: mux}
	mux.HandleFunc("GET /{$}", s.root)
	return s
}

// root leads to the console, or says what there is.
func (s *httpServer) root(w http.ResponseWriter, r *http.Request) {
	if s.ui != nil {
		http.Redirect(w, r, "/ui/", http.StatusFound)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	fmt.Fprintln(w, "walpost run answers /healthz /readyz /status /metrics, and with http.ui: true /ui/")
}

// mount adds the console, nil is none. It is called between Listen and Run.
func (s *httpServer) mount(config *console.Config) {
	if config == nil {
		return
	}
	if config.Token == "" && !isLoopback(s.Addr()) {
		config.Log.Warn("everybody who reaches the console's address can read it; nobody can change anything",
			zap.String("http", s.Addr()),
			zap.String("hint", "set http.token_file, or let http.listen be a loopback address"))
	}
	s.ui = console.New(*config)
	s.mux.Handle("/ui/", s.ui)
}

// Listen takes the address, so that one that is taken is an error before anything else has begun.
func (s *httpServer) Listen(ctx context.Context) error {
	if s.address == "" {
		return nil
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(ctx, "tcp", s.address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return hint.Wrap(fmt.Errorf("listen for HTTP: %w", err),
			"another process, perhaps another walpost, has this address: "+
				"set http.listen (WALPOST_HTTP_LISTEN), empty for off")
	}
	if err != nil {
		return hint.Wrap(fmt.Errorf("listen for HTTP: %w", err), "check http.listen (WALPOST_HTTP_LISTEN)")
	}
	s.ln = ln
	return nil
}

// Addr is the address that is listened on, or "".
func (s *httpServer) Addr() string {
	if s.ln == nil {
		return ""
	}
	return s.ln.Addr().String()
}

// Run serves until ctx is done, then lets running requests finish. Call Listen before.
func (s *httpServer) Run(ctx context.Context) error {
	if s.ln == nil {
		<-ctx.Done()
		return nil
	}
	if s.ui != nil {
		running, end := context.WithCancel(ctx)
		ended := make(chan struct{})
		go func() { defer close(ended); s.ui.Run(running) }() // what follows the stream ends with it
		defer func() { end(); <-ended }()
	}
	if isLoopback(s.Addr()) {
		s.server.Handler = console.LoopbackOnly(s.server.Handler)
	}
	failed := make(chan error, 1)
	go func() { failed <- s.server.Serve(s.ln) }()
	select {
	case err := <-failed:
		return fmt.Errorf("serve HTTP: %w", err)
	case <-ctx.Done():
	}
	grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), httpShutdown)
	defer cancel()
	if err := s.server.Shutdown(grace); err != nil {
		_ = s.server.Close() // a client that reads slowly does not hold up the end
	}
	<-failed
	return nil
}

func probe(ask func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		text := "ok"
		if err := ask(); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
			text = strings.TrimSpace(err.Error())
		}
		fmt.Fprintln(w, text)
	})
}

func statusHandler(health Health) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		body, err := json.MarshalIndent(health.Status(), "", "  ")
		if err != nil {
			http.Error(w, "encode status: "+err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(body, '\n')) // the client has gone: nothing to tell anybody
	})
}
