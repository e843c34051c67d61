package relay

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"math"
	"math/rand/v2"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// tracing makes the spans of the rows that are sampled:
//
//   - outbox.wait, from the commit to Send, or from occurred_at where the table brought the row
//   - outbox.publish, from Send to the PubAck
//   - outbox.mark, from the PubAck to the mark
//
// They are children of the span that the row's traceparent names. A row without one gets a trace of its own,
// whose root is outbox.wait, or outbox.publish where it is not known since when the row waits.
type tracing struct {
	tracer trace.Tracer
	// below: a trace is sampled if the lower 63 bits of its id are less. OpenTelemetry's TraceIDRatioBased
	// does the same, so programs with the same ratio choose the same traces.
	below uint64
}

// traceOf is publish.PublisherConfig.Trace: nil without a tracer or a ratio.
func traceOf(cfg *Config) func(*outbox.Event, string) publish.Trace {
	if cfg.Tracer == nil || cfg.TraceRatio <= 0 {
		return nil
	}
	t := &tracing{tracer: cfg.Tracer, below: uint64(math.Min(cfg.TraceRatio, 1) * (1 << 63))}
	return t.begin
}

// begin allocates nothing for a row that is not sampled.
func (t *tracing) begin(ev *outbox.Event, subject string) publish.Trace {
	parent, found := readTraceparent(ev.Values[outbox.TraceID])
	if !found {
		parent.low, parent.sampled = rand.Uint64(), true
	}
	if parent.low>>1 >= t.below || !parent.sampled {
		return nil
	}
	return t.follow(ev, subject, parent)
}

// follow begins the spans of a row.
func (t *tracing) follow(ev *outbox.Event, subject string, parent traceparent) *rowTrace {
	r := &rowTrace{tracer: t.tracer, parent: context.Background(), subject: subject, sent: time.Now()}
	r.attributes = []attribute.KeyValue{
		attribute.String("walpost.outbox", ev.Table.String()),
		attribute.String("walpost.row.id", string(ev.Values[outbox.ID])),
		attribute.String("walpost.event.type", string(ev.Values[outbox.EventType])),
	}
	if publish.IsTraceparent(parent.text) {
		r.parent = trace.ContextWithRemoteSpanContext(r.parent, parent.context())
	}
	since := ev.CommitTime
	if since.IsZero() {
		since, _ = outbox.ParseTimestamp(ev.Values[outbox.OccurredAt])
	}
	if !since.IsZero() && since.Before(r.sent) {
		r.span("outbox.wait", trace.SpanKindInternal, since, r.sent)
	}
	if id := trace.SpanContextFromContext(r.parent).TraceID(); id.IsValid() {
		r.id = id.String()
	}
	return r
}

// rowTrace is a row that is traced. The publisher's goroutine of PubAcks writes stored and sequence, under
// the publisher's mutex; the marker gets the row later, and makes the spans.
type rowTrace struct {
	tracer     trace.Tracer
	parent     context.Context
	id         string               // the trace's, for exemplars; "" where it is not known before published
	attributes []attribute.KeyValue // of each span
	subject    string
	sent       time.Time
	stored     time.Time
	sequence   uint64
}

// Stored implements publish.Trace.
func (r *rowTrace) Stored(sequence uint64) { r.stored, r.sequence = time.Now(), sequence }

// span makes one that is over. The first of a trace without a parent is the parent of the others.
func (r *rowTrace) span(name string, kind trace.SpanKind, from, to time.Time, more ...attribute.KeyValue) {
	ctx, s := r.tracer.Start(r.parent, name, trace.WithSpanKind(kind), trace.WithTimestamp(from),
		trace.WithAttributes(r.attributes...), trace.WithAttributes(more...))
	if !trace.SpanContextFromContext(r.parent).IsValid() {
		r.parent = ctx
	}
	s.End(trace.WithTimestamp(to))
}

// published makes the span of the message, after Stored. A message that was found in the stream has none.
func (r *rowTrace) published() {
	if r.stored.IsZero() {
		return
	}
	r.span("outbox.publish", trace.SpanKindProducer, r.sent, r.stored,
		attribute.String("messaging.system", "nats"), attribute.String("messaging.operation.type", "send"),
		attribute.String("messaging.destination.name", r.subject),
		attribute.Int64("messaging.nats.sequence", int64(r.sequence)))
}

// marked makes the span of the mark, after published.
func (r *rowTrace) marked() {
	if !r.stored.IsZero() {
		r.span("outbox.mark", trace.SpanKindInternal, r.stored, time.Now())
	}
}

// traceparent is the header of W3C Trace Context.
type traceparent struct {
	text    []byte
	low     uint64 // the second half of the trace's id
	sampled bool
}

// The places of the ids in "00-<32 hex digits>-<16 hex digits>-<2 hex digits>".
const (
	traceIDAt, spanIDAt, traceFlagsAt, traceparentEnd = 3, 36, 53, 55
)

// readTraceparent reads what decides about the sampling. It is called for every row; follow checks the rest.
func readTraceparent(b []byte) (p traceparent, ok bool) {
	if len(b) != traceparentEnd {
		return p, false
	}
	var low [8]byte
	var flags [1]byte
	if _, err := hex.Decode(low[:], b[traceIDAt+16:traceIDAt+32]); err != nil {
		return p, false
	}
	if _, err := hex.Decode(flags[:], b[traceFlagsAt:]); err != nil {
		return p, false
	}
	p.text, p.low = b, binary.BigEndian.Uint64(low[:])
	p.sampled = trace.TraceFlags(flags[0]).IsSampled()
	return p, true
}

func (p traceparent) context() trace.SpanContext {
	traceID, _ := trace.TraceIDFromHex(string(p.text[traceIDAt : traceIDAt+32]))
	spanID, _ := trace.SpanIDFromHex(string(p.text[spanIDAt : spanIDAt+16]))
	return trace.NewSpanContext(trace.SpanContextConfig{
		TraceID: traceID, SpanID: spanID, TraceFlags: trace.FlagsSampled, Remote: true,
	})
}
