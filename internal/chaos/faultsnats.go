package main

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/walpost/walpost/internal/sleep"
)

// rollBack restores the broker's store to what it was some time ago. A stream that was empty then is the case
// store-empty: nothing in it tells a relay what is lost.
func rollBack(ctx context.Context, w *world, rng *rand.Rand) error {
	if last, err := w.lastSeq(ctx); err != nil || last == 0 {
		return errors.Join(errNotNow, err)
	}
	n := w.brokers[0]
	old := filepath.Join(w.dir, "store")
	if err := os.RemoveAll(old); err != nil {
		return err
	}
	if err := n.Stop(ctx); err != nil {
		return err
	}
	if err := n.SnapshotStore(old); err != nil {
		return err
	}
	if err := n.Start(ctx); err != nil {
		return err
	}
	sleep.For(ctx, between(rng, 500*time.Millisecond, 4*time.Second))
	w.lossy.Store(true)
	w.losses.Add(1)
	if err := n.Kill(); err != nil {
		return err
	}
	if err := n.RestoreStore(old); err != nil {
		return err
	}
	if err := n.Start(ctx); err != nil {
		return err
	}
	return w.until(ctx, "the stream is there", func(ctx context.Context) (err error) {
		w.restored, err = w.lastSeq(ctx)
		return err
	})
}

// lastSeq is the stream's last sequence.
func (w *world) lastSeq(ctx context.Context) (uint64, error) {
	s, err := w.js.Stream(ctx, streamName)
	if err != nil {
		return 0, err
	}
	return s.CachedInfo().State.LastSeq, nil
}

// stepDown has the stream's leader hand over to another replica.
func stepDown(ctx context.Context, w *world, rng *rand.Rand) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	reply, err := w.nc.RequestWithContext(ctx, "$JS.API.STREAM.LEADER.STEPDOWN."+streamName, nil)
	if err != nil || bytes.Contains(reply.Data, []byte(`"error"`)) {
		return errors.Join(errNotNow, err)
	}
	return nil
}

// fill leaves the stream no more room than for some messages.
func fill(ctx context.Context, w *world, rng *rand.Rand) error {
	limit := func(most func(jetstream.StreamState) int64) error {
		return w.until(ctx, "the stream's limit is changed", func(ctx context.Context) error {
			s, err := w.js.Stream(ctx, streamName)
			if err != nil {
				return err
			}
			cfg := s.CachedInfo().Config
			cfg.MaxBytes = most(s.CachedInfo().State)
			_, err = w.js.UpdateStream(ctx, cfg)
			return err
		})
	}
	err := limit(func(s jetstream.StreamState) int64 { return int64(s.Bytes) + 50_000 })
	sleep.For(ctx, between(rng, 500*time.Millisecond, 5*time.Second))
	if again := limit(func(jetstream.StreamState) int64 { return -1 }); again != nil {
		return again
	}
	return err
}
