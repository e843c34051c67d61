package telemetry

import (
	"context"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/walpost/walpost/internal/hint"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// TestCheckEndpoint: what is no collector's address gets a hint.
func TestCheckEndpoint(t *testing.T) {
	for endpoint, want := range map[string]string{
		"":                              "",
		"http://localhost:4318":         "",
		"https://collector.example/":    "",
		"http://[::1]:4318":             "",
		"localhost:4318":                "http:// or https://",
		"grpc://localhost:4317":         "http:// or https://",
		"http://":                       "http:// or https://",
		"http://:4318":                  "http:// or https://",
		"http://a b":                    "http:// or https://",
		"http://localhost:4318/v1/logs": "more than a host and a port",
		"http://localhost?x=1":          "more than a host and a port",
		"http://me:secret@localhost":    "has a user",
	} {
		err := CheckEndpoint(endpoint)
		if (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", endpoint, err, want)
		}
		if err != nil && (hint.Of(err) == "" || strings.Contains(err.Error(), "secret")) {
			t.Errorf("%q: error %v with the hint %q", endpoint, err, hint.Of(err))
		}
	}
}

// TestCollectorIsAway: nothing waits for it, and it is told once for each export that nothing arrives.
func TestCollectorIsAway(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	endpoint := "http://" + ln.Addr().String()
	if err := ln.Close(); err != nil {
		t.Fatal(err)
	}
	told := make(chan error, 100)
	e, err := New(t.Context(), Config{
		Endpoint: endpoint, Traces: true, MetricsInterval: time.Hour, Metrics: prometheus.NewRegistry(),
		OnError: func(err error) { told <- err },
	})
	if err != nil {
		t.Fatal(err)
	}
	for range 10_000 { // more than the queue holds
		_, span := e.Tracer().Start(t.Context(), "x")
		span.End()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_ = e.Close(ctx)
	if err := <-told; err == nil || !strings.HasPrefix(err.Error(), "export ") {
		t.Errorf("told %v", err)
	}
}

// TestOff: without an endpoint there is nothing.
func TestOff(t *testing.T) {
	e, err := New(t.Context(), Config{Traces: true, MetricsInterval: time.Second})
	if err != nil || e.Tracer() != nil {
		t.Fatalf("tracer %v, %v", e.Tracer(), err)
	}
	if err := e.Close(t.Context()); err != nil {
		t.Error(err)
	}
}
