package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"

	"github.com/walpost/walpost/consume"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
)

// received is what the collector passes on.
type received struct {
	mu      sync.Mutex // guards the rest
	spans   map[string][]receivedSpan
	metrics map[string]bool
}

type receivedSpan struct {
	Name         string `json:"name"`
	TraceID      string `json:"traceId"`
	SpanID       string `json:"spanId"`
	ParentSpanID string `json:"parentSpanId"`
	service      string
}

func (x *received) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var body struct {
		ResourceSpans []struct {
			Resource struct {
				Attributes []struct {
					Key   string
					Value struct{ StringValue string }
				}
			}
			ScopeSpans []struct{ Spans []receivedSpan }
		}
		ResourceMetrics []struct {
			ScopeMetrics []struct{ Metrics []struct{ Name string } }
		}
	}
	if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, r := range body.ResourceSpans {
		service := ""
		for _, a := range r.Resource.Attributes {
			if a.Key == "service.name" {
				service = a.Value.StringValue
			}
		}
		for _, s := range r.ScopeSpans {
			for _, span := range s.Spans {
				span.service = service
				x.spans[span.TraceID] = append(x.spans[span.TraceID], span)
			}
		}
	}
	for _, r := range body.ResourceMetrics {
		for _, s := range r.ScopeMetrics {
			for _, m := range s.Metrics {
				x.metrics[m.Name] = true
			}
		}
	}
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, "{}")
}

// collector builds and starts the OpenTelemetry collector, and returns its URL.
func (r *rig) collector(to string) string {
	r.t.Helper()
	dir := r.t.TempDir()
	program := filepath.Join(dir, "collector")
	build := exec.CommandContext(r.t.Context(), "go", "build", "-C", "collector", "-o", program, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		r.t.Fatalf("build the collector: %v\n%s", err, out)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	r.must(err)
	address := ln.Addr().String()
	r.must(ln.Close())
	config := filepath.Join(dir, "collector.yaml")
	r.must(os.WriteFile(config, []byte(fmt.Sprintf(`
receivers: {otlp: {protocols: {http: {endpoint: %q}}}}
exporters: {otlp_http: {endpoint: %q, encoding: json, compression: none}}
service:
  pipelines:
    traces: {receivers: [otlp], exporters: [otlp_http]}
    metrics: {receivers: [otlp], exporters: [otlp_http]}
  telemetry: {metrics: {level: none}}
`, address, to)), 0o600))
	cmd := exec.Command(program, "--config", "file:"+config)
	log, err := os.Create(filepath.Join(dir, "log"))
	r.must(err)
	cmd.Stdout, cmd.Stderr = log, log
	r.must(cmd.Start())
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	r.t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		<-ended
		if text, err := os.ReadFile(log.Name()); err == nil && r.t.Failed() {
			r.t.Logf("collector: %s", text)
		}
	})
	eventually(r.t, "the collector listens", func() bool {
		if len(ended) > 0 {
			err := <-ended
			ended <- err
			r.t.Fatalf("the collector ends: %v", err)
		}
		c, err := net.Dial("tcp", address)
		if err == nil {
			_ = c.Close()
		}
		return err == nil
	})
	return "http://" + address
}

// TestTracesReachACollector: the producer's span, the relay's and the consumer's are one trace in a real collector.
func TestTracesReachACollector(t *testing.T) {
	testenv.FullOnly(t)
	t.Parallel()
	r := newRig(t, testenv.NewPostgres(t, testenv.PGOptions{}))
	got := &received{spans: map[string][]receivedSpan{}, metrics: map[string]bool{}}
	back := httptest.NewServer(got)
	defer back.Close()
	collector := r.collector(back.URL)
	r.env = []string{"WALPOST_OTLP_ENDPOINT=" + collector, "WALPOST_OTLP_TRACE_RATIO=1", "WALPOST_OTLP_METRICS_INTERVAL=1s"}
	relay := r.start()
	r.awaitStreaming()

	out, err := otlptracehttp.New(t.Context(), otlptracehttp.WithEndpointURL(collector+"/v1/traces"))
	r.must(err)
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(out, sdktrace.WithBatchTimeout(100*time.Millisecond)))
	defer func() { _ = provider.Shutdown(context.Background()) }()
	tracer := provider.Tracer("shop")

	pool, err := pgxpool.New(t.Context(), r.url)
	r.must(err)
	defer pool.Close()
	inserter := &outbox.Inserter{TraceID: func(ctx context.Context) string {
		carrier := propagation.MapCarrier{}
		propagation.TraceContext{}.Inject(ctx, carrier)
		return carrier["traceparent"]
	}}
	ctx, span := tracer.Start(t.Context(), "place order")
	tx, err := pool.Begin(ctx)
	r.must(err)
	_, err = inserter.Insert(ctx, tx, outbox.Message{
		AggregateType: "order", AggregateID: 1, EventType: "order.placed", Payload: []byte(`{}`),
	})
	r.must(err)
	r.must(tx.Commit(ctx))
	span.End()

	if text, err := r.command("migrate", "up", "--only", "consumer").CombinedOutput(); err != nil {
		t.Fatalf("walpost migrate up: %v\n%s", err, text)
	}
	nc := testenv.ConnectNATS(r.t, r.nats.URL())
	handling, stop := context.WithCancel(t.Context())
	handled := make(chan error, 1)
	go func() {
		handled <- consume.Run(handling, consume.Config{
			Name: "audit", Pool: pool, NATS: nc, Start: "all", Tracer: tracer,
		}, func(ctx context.Context, _ pgx.Tx, _ consume.Event) error {
			_, inner := tracer.Start(ctx, "write invoice")
			inner.End()
			return nil
		})
	}()

	id := span.SpanContext().TraceID().String()
	want := []string{
		"outbox.mark of walpost below place order", "outbox.publish of walpost below place order",
		"outbox.wait of walpost below place order",
	}
	read := func() (names []string) {
		got.mu.Lock()
		defer got.mu.Unlock()
		byID := map[string]string{}
		for _, s := range got.spans[id] {
			byID[s.SpanID] = s.Name
		}
		for _, s := range got.spans[id] {
			switch {
			case s.service == "walpost":
				names = append(names, s.Name+" of walpost below "+byID[s.ParentSpanID])
			case s.ParentSpanID != "":
				names = append(names, s.Name+" below "+byID[s.ParentSpanID])
			}
		}
		slices.Sort(names)
		return names
	}
	want = append(want, "outbox.process below place order", "write invoice below outbox.process")
	slices.Sort(want)
	eventually(t, "the trace is whole", func() bool { return len(read()) >= len(want) })
	if names := read(); !slices.Equal(names, want) {
		t.Errorf("spans:\n%s\nwant\n%s", strings.Join(names, "\n"), strings.Join(want, "\n"))
	}
	for _, name := range []string{"outbox_throughput_total", "walpost_commit_to_ack_seconds", "outbox_lag_seconds"} {
		eventually(t, "the metric "+name, func() bool {
			got.mu.Lock()
			defer got.mu.Unlock()
			return got.metrics[name]
		})
	}
	stop()
	if err := <-handled; err != nil && !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	relay.stop()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for begun := time.Now(); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Since(begun) > testenv.Patience/8 {
			t.Fatalf("waited in vain: %s", what)
		}
	}
}
