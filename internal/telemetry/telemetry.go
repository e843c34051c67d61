// Package telemetry sends traces and metrics to an OpenTelemetry collector, by OTLP over HTTP.
package telemetry

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/go-logr/logr"
	"github.com/prometheus/client_golang/prometheus"
	otelprometheus "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/walpost/walpost/internal/hint"
)

// Config says where telemetry goes. The standard variables OTEL_EXPORTER_OTLP_HEADERS, _CERTIFICATE, _TIMEOUT
// and _COMPRESSION, OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME are read besides.
type Config struct {
	// Endpoint is the collector's URL, without a path: http://localhost:4318. Nothing is sent where it is
	// empty.
	Endpoint string
	// Traces has traces sent.
	Traces bool
	// MetricsInterval is the time between two exports of Metrics; 0 is never.
	MetricsInterval time.Duration
	Metrics         prometheus.Gatherer
	// Version, Slot and Stream describe the relay.
	Version, Slot, Stream string
	// OnError is told, on several goroutines, why something was not sent. It is dropped then: a collector
	// that is away holds nothing up.
	OnError func(error)
}

// Exporter sends what it is given until Close. The zero value sends nothing.
type Exporter struct {
	traces  *sdktrace.TracerProvider
	metrics *metric.MeterProvider
}

// CheckEndpoint reports what is wrong with an endpoint. An empty one is off.
func CheckEndpoint(endpoint string) error {
	const advice = "write the collector's address, as in http://localhost:4318: " +
		"/v1/traces and /v1/metrics are added to it"
	if endpoint == "" {
		return nil
	}
	u, err := url.Parse(endpoint)
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		return hint.Errorf(advice, "%q is not a URL that begins with http:// or https://", endpoint)
	case u.User != nil:
		return hint.Errorf("set OTEL_EXPORTER_OTLP_HEADERS in place of a password", "the URL has a user")
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.Fragment != "":
		return hint.Errorf(advice, "%q has more than a host and a port", endpoint)
	}
	return nil
}

// checkHeaders refuses headers that the SDK cannot read: it would leave them out, and log them.
func checkHeaders() error {
	for _, name := range []string{
		"OTEL_EXPORTER_OTLP_HEADERS",
		"OTEL_EXPORTER_OTLP_TRACES_HEADERS",
		"OTEL_EXPORTER_OTLP_METRICS_HEADERS",
	} {
		text := os.Getenv(name)
		if text == "" {
			continue
		}
		for i, header := range strings.Split(text, ",") {
			key, value, found := strings.Cut(header, "=")
			_, err := url.PathUnescape(value)
			key = strings.TrimSpace(key)
			if !found || err != nil || key == "" || strings.ContainsFunc(key, inNoName) {
				const advice = "write NAME=VALUE with commas between; in a value, % and , are %25 and %2C"
				return hint.Errorf(advice, "%s: header %d is malformed", name, i+1)
			}
		}
	}
	return nil
}

// inNoName reports whether a header's name cannot have the character (RFC 9110).
func inNoName(r rune) bool {
	return r <= ' ' || r > '~' || strings.ContainsRune(`"(),/:;<=>?@[\]{}`, r)
}

// New begins to send. It does not wait for the collector.
func New(ctx context.Context, cfg Config) (*Exporter, error) {
	e := &Exporter{}
	if cfg.Endpoint == "" {
		return e, nil
	}
	if err := checkHeaders(); err != nil {
		return nil, err
	}
	otel.SetLogger(logr.Discard()) // it writes the values of variables that it cannot read
	about, err := describe(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("describe the relay for OpenTelemetry: %w", err)
	}
	base, err := url.Parse(cfg.Endpoint)
	if err != nil {
		return nil, fmt.Errorf("parse the collector's URL: %w", err)
	}
	if cfg.Traces {
		out, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(base.JoinPath("v1/traces").String()))
		if err != nil {
			return nil, fmt.Errorf("make the exporter of traces: %w", err)
		}
		e.traces = sdktrace.NewTracerProvider(sdktrace.WithResource(about),
			sdktrace.WithSampler(sdktrace.AlwaysSample()), sdktrace.WithBatcher(spans{out, cfg.OnError}))
	}
	if cfg.MetricsInterval > 0 {
		to := base.JoinPath("v1/metrics").String()
		out, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(to))
		if err != nil {
			return nil, errors.Join(fmt.Errorf("make the exporter of metrics: %w", err), e.Close(ctx))
		}
		bridge := otelprometheus.NewMetricProducer(otelprometheus.WithGatherer(cfg.Metrics))
		reader := metric.NewPeriodicReader(points{out, cfg.OnError},
			metric.WithInterval(cfg.MetricsInterval), metric.WithProducer(bridge))
		e.metrics = metric.NewMeterProvider(metric.WithResource(about), metric.WithReader(reader))
	}
	return e, nil
}

// describe is what all traces and metrics say of their source.
func describe(ctx context.Context, cfg Config) (*resource.Resource, error) {
	return resource.New(ctx,
		resource.WithAttributes(
			attribute.String("service.name", "walpost"), attribute.String("service.version", cfg.Version),
			attribute.String("walpost.slot", cfg.Slot), attribute.String("walpost.stream", cfg.Stream)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
}

// Tracer is nil where no traces are sent.
func (e *Exporter) Tracer() trace.Tracer {
	if e.traces == nil {
		return nil
	}
	return e.traces.Tracer("github.com/walpost/walpost")
}

// Close sends what is left, as far as ctx allows.
func (e *Exporter) Close(ctx context.Context) error {
	var errs []error
	if e.traces != nil {
		errs = append(errs, e.traces.Shutdown(ctx))
	}
	if e.metrics != nil {
		errs = append(errs, e.metrics.Shutdown(ctx))
	}
	return errors.Join(errs...)
}

// spans tells of its own errors: those of the SDK go to a handler that the whole process shares.
type spans struct {
	sdktrace.SpanExporter
	onError func(error)
}

// ExportSpans implements sdktrace.SpanExporter.
func (s spans) ExportSpans(ctx context.Context, some []sdktrace.ReadOnlySpan) error {
	if err := s.SpanExporter.ExportSpans(ctx, some); err != nil {
		s.onError(fmt.Errorf("export %d spans: %w", len(some), err))
	}
	return nil
}

// points is the same for metrics. It also decodes the trace ids of exemplars, which the bridge leaves as the
// hexadecimal digits that Prometheus has. A collector refuses those, and all metrics with them.
type points struct {
	metric.Exporter
	onError func(error)
}

// Export implements metric.Exporter.
func (p points) Export(ctx context.Context, some *metricdata.ResourceMetrics) error {
	for _, scope := range some.ScopeMetrics {
		for _, m := range scope.Metrics {
			if h, ok := m.Data.(metricdata.Histogram[float64]); ok {
				decodeTraceIDs(h)
			}
		}
	}
	if err := p.Exporter.Export(ctx, some); err != nil {
		p.onError(fmt.Errorf("export metrics: %w", err))
	}
	return nil
}

func decodeTraceIDs(h metricdata.Histogram[float64]) {
	for _, point := range h.DataPoints {
		for i := range point.Exemplars {
			e := &point.Exemplars[i]
			if id, err := trace.TraceIDFromHex(string(e.TraceID)); err == nil {
				e.TraceID = id[:]
			}
		}
	}
}
