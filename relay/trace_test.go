package relay_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/testenv"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/relay"
)

const (
	sampledTrace   = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	unsampledTrace = "00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
)

// trace has the relay make spans, and returns them.
func (r *rig) trace(ratio float64) *tracetest.InMemoryExporter {
	spans := tracetest.NewInMemoryExporter()
	provider := sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans))
	r.cfg.Tracer, r.cfg.TraceRatio = provider.Tracer("test"), ratio
	return spans
}

// TestTraces: a row whose traceparent is sampled has spans below it, one without has a trace, and others have none.
func TestTraces(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		mode  relay.Mode
		mark  outbox.Mark
		spans string // of a row
	}{
		"stream": {relay.ModeStream, outbox.MarkUpdate, "outbox.mark outbox.publish outbox.wait"},
		"poll":   {relay.ModePoll, outbox.MarkDelete, "outbox.mark outbox.publish outbox.wait"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t, testenv.SharedPostgres(t))
			spans := r.trace(1)
			r.cfg.Mode, r.cfg.Outboxes[0].Mark = c.mode, c.mark
			x := r.startAtWork()
			begun := time.Now().Add(-time.Minute) // clocks
			r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, trace_id) VALUES
				('order', 1, 'order.placed', '{}', $1), ('order', 2, 'order.placed', '{}', $2),
				('order', 3, 'order.placed', '{}', NULL), ('order', 4, 'order.placed', '{}', 'request 4')`,
				sampledTrace, unsampledTrace)
			want := 3 * len(strings.Fields(c.spans))
			eventually(t, fmt.Sprintf("%d spans", want), func() bool { return len(spans.GetSpans()) >= want })
			exemplar := x.exemplar("walpost_commit_to_ack_seconds")
			x.halt()
			rows := map[string][]string{}
			traces := map[string]trace.TraceID{}
			for _, s := range spans.GetSpans() {
				var row string
				for _, a := range s.Attributes {
					if a.Key == "walpost.row.id" {
						row = a.Value.AsString()
					}
				}
				rows[row] = append(rows[row], s.Name)
				if id := s.SpanContext.TraceID(); !traces[row].IsValid() {
					traces[row] = id
				} else if traces[row] != id {
					t.Errorf("row %s has the traces %s and %s", row, traces[row], id)
				}
				if row == "1" && (s.SpanContext.TraceID().String() != sampledTrace[3:35] || s.Parent.SpanID().String() != sampledTrace[36:52]) {
					t.Errorf("%s of row 1 is in trace %s below %s", s.Name, s.SpanContext.TraceID(), s.Parent.SpanID())
				}
				if row != "1" && s.Parent.IsValid() == (s.Name == "outbox.wait") {
					t.Errorf("%s of row %s is below %s", s.Name, row, s.Parent.SpanID())
				}
				if s.StartTime.Before(begun) || s.EndTime.Before(s.StartTime) {
					t.Errorf("%s of row %s is from %s to %s", s.Name, row, s.StartTime, s.EndTime)
				}
			}
			for _, row := range []string{"1", "3", "4"} {
				slices.Sort(rows[row])
				if got := strings.Join(rows[row], " "); got != c.spans {
					t.Errorf("row %s has the spans %q, want %q", row, got, c.spans)
				}
			}
			if len(rows) != 3 {
				t.Errorf("rows with spans: %v", rows)
			}
			if c.mode == relay.ModeStream && exemplar == "" {
				t.Error("the histogram has no exemplar")
			}
		})
	}
}

// TestTraceRatio: the traces are those that OpenTelemetry's TraceIDRatioBased chooses, in batches, too.
func TestTraceRatio(t *testing.T) {
	t.Parallel()
	r := newRig(t, testenv.SharedPostgres(t))
	const ratio, rows = 0.25, 400
	spans := r.trace(ratio)
	x := r.startAtWork()
	r.exec(`INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, trace_id)
		SELECT 'order', n, 'order.placed', '{}', '00-' || md5(n::text) || '-b7ad6b7169203331-01' FROM generate_series(1, $1) n`, rows)
	r.pending(0)
	x.halt()
	sampler := sdktrace.TraceIDRatioBased(ratio)
	want, got := map[string]bool{}, map[string]bool{}
	for n := range rows {
		id, err := trace.TraceIDFromHex(r.query1(`SELECT md5($1::text)`, fmt.Sprint(n+1)))
		r.must(err)
		if sampler.ShouldSample(sdktrace.SamplingParameters{ParentContext: t.Context(), TraceID: id}).Decision == sdktrace.RecordAndSample {
			want[id.String()] = true
		}
	}
	for _, s := range spans.GetSpans() {
		id := s.SpanContext.TraceID()
		got[id.String()] = true
		if !want[id.String()] {
			t.Errorf("trace %s is sampled: its number is %d", id, binary.BigEndian.Uint64(id[8:])>>1)
		}
	}
	if len(got) != len(want) || len(want) == 0 {
		t.Errorf("%d traces are sampled, want %d", len(got), len(want))
	}
}

// exemplar is the trace's id of some exemplar of a histogram.
func (x *running) exemplar(name string) string {
	x.rig.t.Helper()
	families, err := x.registry.Gather()
	x.rig.must(err)
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, b := range m.GetHistogram().GetBucket() {
				if e := b.GetExemplar(); f.GetName() == name && len(e.GetLabel()) > 0 {
					return e.GetLabel()[0].GetValue()
				}
			}
		}
	}
	return ""
}

// TestTracedDrain tells what traces cost: WALPOST_TRACED_ROWS rows are drained without them and with 1 % of them sent to a
// collector, in turns.
func TestTracedDrain(t *testing.T) {
	rows, err := strconv.Atoi(os.Getenv("WALPOST_TRACED_ROWS"))
	if err != nil {
		t.Skip("a measurement: set WALPOST_TRACED_ROWS=300000")
	}
	sink := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		_, _ = io.Copy(io.Discard, req.Body)
	}))
	defer sink.Close()
	out, err := otlptracehttp.New(t.Context(), otlptracehttp.WithEndpointURL(sink.URL))
	if err != nil {
		t.Fatal(err)
	}
	provider := sdktrace.NewTracerProvider(sdktrace.WithBatcher(out))
	defer func() { _ = provider.Shutdown(context.Background()) }()
	cpu := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			t.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	// drain returns the rows a second, and this process's CPU time for a row: the relay's and the sink's.
	drain := func(ratio float64) (rate, spent float64) {
		r := newRig(t, testenv.SharedPostgres(t))
		r.cfg.Stream.Batching = jetstream.BatchSingle
		r.cfg.Tracer, r.cfg.TraceRatio = provider.Tracer("test"), ratio
		r.start().streaming().halt()
		r.exec(`DO $$ BEGIN FOR i IN 1..` + strconv.Itoa(rows) + ` BY 100 LOOP
			INSERT INTO outbox_messages (aggregate_type, aggregate_id, event_type, payload, trace_id)
				SELECT 'account', i, 'account.moved', jsonb_build_object('n', n, 'pad', repeat('x', 270)),
					'00-' || md5(i::text || n::text) || '-b7ad6b7169203331-01' FROM generate_series(1, 100) n;
			COMMIT; END LOOP; END $$`)
		stored := 0
		var begun, ended time.Time
		var before, after time.Duration
		done := make(chan struct{})
		r.cfg.OnStored = func(time.Duration) {
			switch stored++; stored {
			case rows / 10:
				begun, before = time.Now(), cpu()
			case rows:
				ended, after = time.Now(), cpu()
				close(done)
			}
		}
		x := r.start()
		select {
		case <-done:
		case <-time.After(time.Minute):
			t.Fatalf("not everything is stored: %+v", x.Status())
		}
		x.halt()
		r.dropSlot(r.cfg.Slot)
		n := float64(rows) * 0.9
		return n / ended.Sub(begun).Seconds(), float64((after - before).Nanoseconds()) / 1000 / n
	}
	var ratios, more []float64
	for n := range 21 {
		var off, some, cpuOff, cpuSome float64
		if n%2 == 0 {
			off, cpuOff = drain(0)
			some, cpuSome = drain(0.01)
		} else {
			some, cpuSome = drain(0.01)
			off, cpuOff = drain(0)
		}
		t.Logf("rows/s: %.0f without traces, %.0f with 1 %%: %.3f; CPU time of a row: %.2f and %.2f us", off, some, some/off, cpuOff, cpuSome)
		if n > 0 { // the first is for warming up
			ratios, more = append(ratios, some/off), append(more, cpuSome-cpuOff)
		}
	}
	slices.Sort(ratios)
	slices.Sort(more)
	t.Logf("with 1 %% of the traces: %.3f of the rate, and %.2f us more CPU time for a row (medians of %d)", ratios[len(ratios)/2], more[len(more)/2], len(ratios))
}
