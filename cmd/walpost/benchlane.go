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

// publishAlone stores n messages through a lane such as the relay's, as if transactions of so many rows
// brought them, and returns when all have their PubAck.
func publishAlone(
	ctx context.Context, nc *nats.Conn, cfg *Config, eventType, payload string, n, perTx int,
) error {
	lane, err := newBenchLane(ctx, nc, cfg)
	if err != nil {
		return err
	}
	defer lane.Close()
	tables, err := cfg.Tables()
	if err != nil {
		return err
	}
	settling, cancel := context.WithCancel(ctx)
	settled := make(chan struct{})
	go func() {
		defer close(settled)
		settleAll(settling, lane, n)
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
			lane.EndTransaction()
		}
		if err := lane.Send(ctx, event, nil); err != nil {
			return err
		}
	}
	lane.EndTransaction()
	if err := lane.Flush(); err != nil {
		return err
	}
	select {
	case <-settled:
		return context.Cause(ctx)
	case <-lane.Failed():
		return lane.Err()
	}
}

const benchSystem = "7000000000000000000" // as long as a cluster's identifier

// newBenchLane is a lane at the end of the benchmark's stream.
func newBenchLane(ctx context.Context, nc *nats.Conn, cfg *Config) (*publish.Lane, error) {
	template, err := publish.NewTemplate(cfg.NATS.Subject)
	if err != nil {
		return nil, err
	}
	s, err := jetstream.NewStream(nc, jetstream.StreamConfig{
		Name: cfg.NATS.Stream, Domain: cfg.NATS.Domain, Pattern: template.Pattern(),
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
	lane, err := publish.NewLane(ctx, publish.LaneConfig{
		Conn: nc, Stream: s, Subjects: publish.NewSubjects(template), Envelope: envelope,
		Chained: !cfg.NATS.Shared, Base: info.LastSeq,
		Window: cfg.Publish.Window, WindowBytes: int(cfg.Publish.WindowBytes),
		Batching: jetstream.Batching(cfg.Publish.Batch).Resolve(&info.Config, cfg.NATS.Shared),
		Position: outbox.Position{SystemID: benchSystem, Timeline: 1},
	})
	if err == nil {
		lane.Adapt(info)
	}
	return lane, err
}

// settleAll takes n messages out of the lane's hands as they have their PubAck.
func settleAll(ctx context.Context, lane *publish.Lane, n int) {
	var stored []publish.Delivery
	var indexes []uint64
	for n > 0 {
		select {
		case <-lane.Stored():
		case <-ctx.Done():
			return
		}
		stored, indexes = lane.Take(stored[:0], jetstream.U), indexes[:0]
		for _, d := range stored {
			indexes = append(indexes, d.Index)
		}
		lane.Settled(indexes)
		n -= len(stored)
	}
}
