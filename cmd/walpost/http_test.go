package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/walpost/walpost/internal/hint"
)

type fakeHealth struct{ live, ready error }

func (f fakeHealth) Live() error  { return f.live }
func (f fakeHealth) Ready() error { return f.ready }
func (f fakeHealth) Status() any  { return map[string]string{"mode": "stream"} }

// fakeRelay runs until it is stopped, or fails at once.
type fakeRelay struct {
	fail    error
	stopped chan struct{}
}

func (f fakeRelay) Run(ctx context.Context) error {
	if f.fail != nil {
		return f.fail
	}
	<-ctx.Done()
	close(f.stopped)
	return nil
}

func listen(t *testing.T, address string, health Health) *httpServer {
	t.Helper()
	s := newHTTPServer(address, newRegistry(), health, zap.NewNop())
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	return s
}

func get(t *testing.T, s *httpServer, path string) (int, string) {
	t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
	resp, err := client.Get("http://" + s.Addr() + path)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// TestHTTPOfAnotherHost: a browser that a page's name leads to a loopback address gets nothing. Probes send pods' addresses, to
// other listeners.
func TestHTTPOfAnotherHost(t *testing.T) {
	for address, want := range map[string]int{"127.0.0.1:0": 421, "0.0.0.0:0": 200} {
		s := listen(t, address, fakeHealth{})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		_, port, err := net.SplitHostPort(s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		for _, path := range []string{"/metrics", "/status", "/healthz", "/readyz", "/"} {
			for host, code := range map[string]int{"evil.example": want, "evil.example:" + port: want, "10.0.0.7:9464": want, "localhost:" + port: 200, "[::1]": 200} {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://127.0.0.1:"+port+path, nil)
				if err != nil {
					t.Fatal(err)
				}
				req.Host = host
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				_ = resp.Body.Close()
				if resp.StatusCode != code {
					t.Errorf("%s of host %s at %s: %d, want %d", path, host, address, resp.StatusCode, code)
				}
			}
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func TestHTTP(t *testing.T) {
	s := listen(t, "127.0.0.1:0", fakeHealth{ready: errors.New("no stream yet")})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	tests := []struct {
		path string
		code int
		text string
	}{
		{"/healthz", 200, "ok\n"},
		{"/readyz", 503, "no stream yet\n"},
		{"/status", 200, `"mode": "stream"`},
		{"/metrics", 200, "walpost_build_info{"},
		{"/", 200, "/healthz /readyz /status /metrics"},
		{"/nothing", 404, ""},
	}
	for _, tt := range tests {
		if code, body := get(t, s, tt.path); code != tt.code || !strings.Contains(body, tt.text) {
			t.Errorf("%s = %d %q", tt.path, code, body)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestHTTPAddressTaken(t *testing.T) {
	first := listen(t, "127.0.0.1:0", fakeHealth{})
	defer first.ln.Close() //nolint:errcheck // never served
	second := newHTTPServer(first.Addr(), newRegistry(), fakeHealth{}, zap.NewNop())
	err := second.Listen(t.Context())
	if err == nil || !strings.HasPrefix(err.Error(), "listen for HTTP: ") || !strings.Contains(hint.Of(err), "http.listen") {
		t.Errorf("error %v, hint %q", err, hint.Of(err))
	}
}

func TestRunBoth(t *testing.T) {
	boom := errors.New("boom")
	t.Run("stops when asked", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		relay := fakeRelay{stopped: make(chan struct{})}
		done := make(chan error, 1)
		s := listen(t, "127.0.0.1:0", fakeHealth{})
		go func() { done <- runBoth(ctx, relay, s) }()
		get(t, s, "/healthz")
		cancel()
		<-relay.stopped
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	t.Run("relay fails", func(t *testing.T) {
		err := runBoth(t.Context(), fakeRelay{fail: boom}, listen(t, "127.0.0.1:0", fakeHealth{}))
		if !errors.Is(err, boom) {
			t.Errorf("error = %v", err)
		}
	})
	t.Run("server fails", func(t *testing.T) {
		s := listen(t, "127.0.0.1:0", fakeHealth{})
		relay := fakeRelay{stopped: make(chan struct{})}
		_ = s.ln.Close()
		if err := runBoth(t.Context(), relay, s); err == nil {
			t.Error("a dead server goes unnoticed")
		}
		<-relay.stopped
	})
	t.Run("without a server", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		s := listen(t, "", fakeHealth{})
		if err := runBoth(ctx, fakeRelay{stopped: make(chan struct{})}, s); err != nil || s.Addr() != "" {
			t.Errorf("error = %v, address %q", err, s.Addr())
		}
	})
}

// TestHTTPConnectionsAreLimited: whoever opens connections without end keeps no probe out, and no more than the limit.
func TestHTTPConnectionsAreLimited(t *testing.T) {
	s := listen(t, "127.0.0.1:0", fakeHealth{})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	defer func() { stop(); <-done }()
	var conns []net.Conn
	for range httpConnections + 20 {
		c, err := net.Dial("tcp", s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = c.Write([]byte("GET /healthz HTTP/1.1\r\n")) // never finished
		conns = append(conns, c)
	}
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	resp, err := client.Get("http://" + s.Addr() + "/healthz")
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("the probe got %v, %v", resp, err)
	}
	_ = resp.Body.Close()
	for i, c := range conns[:20] {
		_ = c.SetReadDeadline(time.Now().Add(5 * time.Second))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("connection %d is still there: %v", i, err)
		}
	}
}

// elsewhere is a listener that says that it listens on another machine's address.
type elsewhere struct{ net.Listener }

func (elsewhere) Addr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 9464} }

// TestConsoleOnANetwork: without a token the log warns, reads are open to any host, and nothing can be changed.
func TestConsoleOnANetwork(t *testing.T) {
	for _, token := range []string{"", consoleToken} {
		core, logs := observer.New(zap.WarnLevel)
		cfg := defaultConfig()
		cfg.HTTP.UI = true
		if token != "" {
			cfg.HTTP.TokenFile = filepath.Join(t.TempDir(), "token")
			if err := os.WriteFile(cfg.HTTP.TokenFile, []byte(token), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		registry := newRegistry()
		config, err := runConsole(cfg, fakeHealth{}, registry, zap.New(core))
		if err != nil {
			t.Fatal(err)
		}
		s := newHTTPServer("127.0.0.1:0", registry, fakeHealth{}, zap.NewNop())
		if err := s.Listen(t.Context()); err != nil {
			t.Fatal(err)
		}
		base := "http://" + s.Addr()
		s.ln = elsewhere{s.ln}
		s.mount(config)
		ctx, cancel := context.WithCancel(t.Context())
		served := make(chan error, 1)
		go func() { served <- s.Run(ctx) }()
		v := &view{t: t, base: base, token: token, host: "walpost.example:9464"}
		if code, _, text := v.do("/ui/api/series", ""); code != http.StatusOK {
			t.Errorf("token %q: a read answers %d: %s", token, code, text)
		}
		if token == "" {
			v.refused(403, "http.token_file", "/ui/api/deadletters/discard", `{"ids": [1]}`)
		} else {
			v.refused(401, "token", "/ui/api/series", "", "Authorization", "")
		}
		if warned := logs.FilterMessageSnippet("everybody who reaches the console's address").Len(); (warned == 1) != (token == "") {
			t.Errorf("token %q: the log has %v", token, logs.All())
		}
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	}
}

// TestConsoleEndsWithItsServer: a server that fails does not wait for the console.
func TestConsoleEndsWithItsServer(t *testing.T) {
	cfg := defaultConfig()
	cfg.HTTP.UI = true
	registry := newRegistry()
	config, err := runConsole(cfg, fakeHealth{}, registry, zap.NewNop())
	if err != nil {
		t.Fatal(err)
	}
	s := newHTTPServer("127.0.0.1:0", registry, fakeHealth{}, zap.NewNop())
	if err := s.Listen(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mount(config)
	if err := s.ln.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Run(t.Context()); err == nil {
		t.Error("a server whose listener is closed runs on")
	}
}
