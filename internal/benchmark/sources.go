package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/walpost/walpost/internal/testenv"
)

// sources is how fast streams are written, and one that has them as sources.
type sources struct {
	Streams  int     `json:"streams"`
	Messages int     `json:"messages"`
	Written  float64 `json:"written_per_s"` // by all writers together
	Joined   float64 `json:"joined_per_s"`  // from the first message to the last in the joined stream
	// Behind is how long after the last message was written the joined stream has it, in milliseconds.
	Behind float64 `json:"behind_ms"`
}

const sourced = 400_000 // messages

func measureSources(ctx context.Context, folder string) error {
	var all []sources
	for _, streams := range []int{1, 2, 4, 8} {
		s := sources{Streams: streams, Messages: sourced}
		fmt.Fprintf(os.Stderr, "sources: %d streams\n", streams)
		if err := s.measure(ctx); err != nil {
			return err
		}
		all = append(all, s)
	}
	text, err := json.MarshalIndent(all, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, "sources.json"), append(text, '\n'), 0o644)
}

func (s *sources) measure(ctx context.Context) error {
	server, err := testenv.StartNATS(ctx, testenv.NATSOptions{Process: true})
	if err != nil {
		return err
	}
	defer server.Close()
	nc, err := nats.Connect(server.URL())
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		return err
	}
	joined := jetstream.StreamConfig{Name: "ALL"}
	for n := range s.Streams {
		name := fmt.Sprintf("SHARD%d", n)
		config := jetstream.StreamConfig{Name: name, Subjects: []string{name + ".>"}}
		if _, err := js.CreateStream(ctx, config); err != nil {
			return err
		}
		joined.Sources = append(joined.Sources, &jetstream.StreamSource{Name: name})
	}
	all, err := js.CreateStream(ctx, joined)
	if err != nil {
		return err
	}
	begun := time.Now()
	var group errgroup.Group
	for n := range s.Streams {
		group.Go(func() error {
			return write(ctx, server.URL(), fmt.Sprintf("SHARD%d", n), s.Messages/s.Streams)
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	written := time.Now()
	for {
		info, err := all.Info(ctx)
		if err != nil {
			return err
		}
		if info.State.Msgs == uint64(s.Messages) {
			break
		}
		time.Sleep(2 * time.Millisecond)
	}
	s.Written = float64(s.Messages) / written.Sub(begun).Seconds()
	s.Joined = float64(s.Messages) / time.Since(begun).Seconds()
	s.Behind = float64(time.Since(written).Microseconds()) / 1000
	return nil
}

func write(ctx context.Context, url, stream string, messages int) error {
	nc, err := nats.Connect(url)
	if err != nil {
		return err
	}
	defer nc.Close()
	js, err := jetstream.New(nc, jetstream.WithPublishAsyncMaxPending(4096))
	if err != nil {
		return err
	}
	body := make([]byte, 300)
	for range messages {
		_, err := js.PublishAsync(stream+".order.placed", body, jetstream.WithStallWait(time.Minute))
		if err != nil {
			return err
		}
	}
	select {
	case <-js.PublishAsyncComplete():
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
