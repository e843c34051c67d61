package main

import (
	"context"
	"fmt"
	"iter"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go/jetstream"
)

// follow hands every message of the stream, from the first on or only new ones,
// to fn, until the returned function is called.
func follow(
	ctx context.Context, js jetstream.JetStream, from jetstream.DeliverPolicy, fn func(jetstream.Msg),
) (stop func(), err error) {
	c, err := js.OrderedConsumer(ctx, streamName, jetstream.OrderedConsumerConfig{DeliverPolicy: from})
	if err != nil {
		return nil, fmt.Errorf("follow stream %s: %w", streamName, err)
	}
	consuming, err := c.Consume(fn)
	if err != nil {
		return nil, fmt.Errorf("follow stream %s: %w", streamName, err)
	}
	return func() { consuming.Stop(); <-consuming.Closed() }, nil
}

// readStream counts the whole stream, as it is now.
func readStream(ctx context.Context, js jetstream.JetStream) (*tally, error) {
	t := newTally()
	s, err := js.Stream(ctx, streamName)
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", streamName, err)
	}
	if s.CachedInfo().State.Msgs == 0 {
		return t, nil
	}
	c, err := js.OrderedConsumer(ctx, streamName, jetstream.OrderedConsumerConfig{})
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", streamName, err)
	}
	messages, err := c.Messages()
	if err != nil {
		return nil, fmt.Errorf("read stream %s: %w", streamName, err)
	}
	defer messages.Stop()
	for {
		m, err := messages.Next(jetstream.NextContext(ctx))
		if err != nil {
			return nil, fmt.Errorf("read stream %s: %w", streamName, err)
		}
		t.add(m)
		if meta, err := m.Metadata(); err != nil || meta.NumPending == 0 {
			return t, err
		}
	}
}

const selectRows = `
SELECT id, aggregate_type || '/' || aggregate_id, event_type, payload::text,
    processed_at IS NULL AND (last_error IS NOT NULL OR available_at > now())
FROM outbox_messages`

// readTable reads the whole outbox.
func readTable(ctx context.Context, conn *pgx.Conn) iter.Seq2[row, error] {
	return func(yield func(row, error) bool) {
		rows, err := conn.Query(ctx, selectRows)
		if err != nil {
			yield(row{}, err)
			return
		}
		defer rows.Close()
		for rows.Next() {
			var r row
			err := rows.Scan(&r.id, &r.aggregate, &r.eventType, &r.payload, &r.recorded)
			if !yield(r, err) || err != nil {
				return
			}
		}
		if err := rows.Err(); err != nil {
			yield(row{}, err)
		}
	}
}
