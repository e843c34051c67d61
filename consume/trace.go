package consume

import (
	"context"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
)

// span begins the span of a handler's call, and returns what ends it. One event's is a child of the span that
// its traceparent names. That of several events has links to theirs.
func (c Config) span(ctx context.Context, events []Event) (context.Context, func(error)) {
	if c.Tracer == nil {
		return ctx, func(error) {}
	}
	e := &events[0]
	options := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(
			attribute.String("messaging.system", "nats"),
			attribute.String("messaging.operation.type", "process"),
			attribute.String("messaging.destination.name", e.Subject),
			attribute.String("messaging.consumer.group.name", c.Name)),
	}
	if len(events) == 1 {
		ctx = remote(ctx, e)
		options = append(options, trace.WithAttributes(
			attribute.String("messaging.message.id", e.ID),
			attribute.String("walpost.event.type", e.Type),
			attribute.Int("walpost.attempt", e.Attempt),
			attribute.Int64("messaging.nats.sequence", int64(e.Sequence))))
	} else {
		count := attribute.Int("messaging.batch.message_count", len(events))
		options = append(options, trace.WithAttributes(count))
		for i := range events {
			if of := trace.SpanContextFromContext(remote(context.Background(), &events[i])); of.IsValid() {
				options = append(options, trace.WithLinks(trace.Link{SpanContext: of}))
			}
		}
	}
	ctx, span := c.Tracer.Start(ctx, "outbox.process", options...)
	return ctx, func(err error) {
		if err != nil {
			span.RecordError(err)
			span.SetStatus(codes.Error, "the handler failed")
		}
		span.End()
	}
}

// remote adds the span that an event's traceparent names.
func remote(ctx context.Context, e *Event) context.Context {
	return propagation.TraceContext{}.Extract(ctx, propagation.MapCarrier{"traceparent": e.Trace})
}
