package main

import (
	"context"
	"strconv"

	"github.com/nats-io/nats.go"

	"github.com/walpost/walpost/bench"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// publishAlone stores n messages through a publisher such as the relay's, as if transactions of so many rows
// brought them, and returns when all have their PubAck.
func publishAlone(
	ctx context.Context, nc *nats.Conn, cfg *Config, eventType, payload string, n, perTx int,
) error {
	publisher, err := newBenchPublisher(ctx, nc, cfg)
	if err != nil {
		return err
	}
	defer publisher.Close()
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	settling, cancel := context.WithCancel(ctx)
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		settleAll(settling, publisher, n)
	}()
	defer func() {
		cancel()
		<-settled
	}()
	event := &outbox.Event{Table: tables[0]}
	for f, v := range map[outbox.Field]string{
		outbox.TenantID: "0", outbox.AggregateType: "bench",
		outbox.EventType: eventType, outbox.EventVersion: "1",
		outbox.OccurredAt: "2026-11-20 09:00:00.123456+00", outbox.Payload: payload,
	} {
		event.Values[f] = []byte(v)
	}
	for i := range n {
		event.Values[outbox.ID] = strconv.AppendInt(event.Values[outbox.ID][:0], int64(i), 10)
		aggregate := event.Values[outbox.AggregateID][:0]
		event.Values[outbox.AggregateID] = strconv.AppendInt(aggregate, int64(i%1000), 10)
		event.XID, event.N = uint32(i/perTx), uint32(i%perTx+1)
		event.Commit = outbox.LSN(i/perTx+1) * outbox.LSN(perTx) << 9
		if event.N == 1 && i > 0 {
			publisher.EndTransaction()
		}
		if err := publisher.Send(ctx, event, nil); err != nil {
			return err
		}
	}
	publisher.EndTransaction()
	if err := publisher.Flush(); err != nil {
		return err
	}
	select {
	case <-settled:
		return context.Cause(ctx)
	case <-publisher.Failed():
		return publisher.Err()
	}
}

const benchSystem = "7000000000000000000" // as long as a cluster's identifier

// newBenchPublisher is a publisher at the end of the benchmark's stream.
func newBenchPublisher(ctx context.Context, nc *nats.Conn, cfg *Config) (*publish.Publisher, error) {
	template, err := publish.NewTemplate(cfg.NATS.Subject)
	if err != nil {
		return nil, err
	}
	s, err := jetstream.NewStream(nc, jetstream.StreamConfig{
		Name: cfg.NATS.Stream, Domain: cfg.NATS.Domain,
		Pattern: template.Pattern(), Partitions: template.Partitions(),
	})
	if err != nil {
		return nil, err
	}
	info, err := s.Info(ctx)
	if err != nil {
		return nil, err
	}
	envelope, err := publish.NewEnvelope(publish.EnvelopeConfig{
		Source: benchSystem + "/" + bench.Database,
		Stream: cfg.NATS.Stream,
		Format: publish.Format(cfg.NATS.Format),
	})
	if err != nil {
		return nil, err
	}
	publisher, err := publish.NewPublisher(ctx, publish.PublisherConfig{
		Conn: nc, Stream: s, Subjects: publish.NewSubjects(template), Envelope: envelope,
		Chained: !cfg.NATS.Shared, Base: info.LastSeq,
		Window: cfg.Publish.Window, WindowBytes: int(cfg.Publish.WindowBytes),
		Batching: jetstream.Batching(cfg.Publish.Batch).Resolve(&info.Config, cfg.NATS.Shared),
		Position: outbox.Position{SystemID: benchSystem, Timeline: 1},
	})
	if err == nil {
		publisher.Adapt(info)
	}
	return publisher, err
}

// settleAll has the publisher forget n messages as they have their PubAck.
func settleAll(ctx context.Context, publisher *publish.Publisher, n int) {
	var stored []publish.Delivery
	var indexes []uint64
	for n > 0 {
		select {
		case <-publisher.Stored():
		case <-ctx.Done():
			return
		}
		stored, indexes = publisher.Take(stored[:0], jetstream.U), indexes[:0]
		for _, d := range stored {
			indexes = append(indexes, d.Index)
		}
		publisher.Release(indexes)
		n -= len(stored)
	}
}
