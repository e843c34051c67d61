package telemetry

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
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

// TestMalformedHeaders are refused, and nothing prints their values: they have passwords. A process of its own says what the SDK
// writes to standard error.
func TestMalformedHeaders(t *testing.T) {
	if os.Getenv("WALPOST_TEST_HEADERS") != "" {
		e, err := New(t.Context(), Config{
			Endpoint: "http://127.0.0.1:1", Traces: true, MetricsInterval: time.Hour, Metrics: prometheus.NewRegistry(), OnError: func(error) {},
		})
		fmt.Printf("New: %v; hint: %s\n", err, hint.Of(err))
		if e != nil {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_ = e.Close(ctx)
		}
		return
	}
	for name, text := range map[string]string{
		"OTEL_EXPORTER_OTLP_HEADERS":         "a=b,Bearer secret",
		"OTEL_EXPORTER_OTLP_TRACES_HEADERS":  "Authorization=Basic%2secret",
		"OTEL_EXPORTER_OTLP_METRICS_HEADERS": "the secret=1",
		"OTEL_EXPORTER_OTLP_ENDPOINT":        "http://me:secret%zz@localhost",
	} {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestMalformedHeaders$")
		cmd.Env = append(os.Environ(), "WALPOST_TEST_HEADERS=1", name+"="+text)
		said, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(said), "New: ") {
			t.Fatalf("%v: %s", err, said)
		}
		if strings.Contains(string(said), "secret") {
			t.Errorf("%s: it says %s", name, said)
		}
		if strings.HasSuffix(name, "HEADERS") && !strings.Contains(string(said), "is malformed; hint: write NAME=VALUE") {
			t.Errorf("%s is taken: %s", name, said)
		}
	}
}
