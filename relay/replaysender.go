package relay

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// A replay has one chunk of rows in flight. A live row waits behind it, so the chunk is as large as the
// stream stores within a time: chunkTime, or idleChunkTime where no live rows come.
const (
	leastChunk    = 64
	mostChunk     = 1024
	chunkTime     = 3 * time.Millisecond
	idleChunkTime = 20 * time.Millisecond
)

// replaySender is the publisher of a replay: the session's, or one of another stream.
type replaySender struct {
	publisher *publish.Publisher
	stream    *jetstream.Stream
	close     func()
	window    int // of the publisher
	acks      *replayAcks
	sent      int64

	chunk int // rows
	live  int64
	busy  time.Time // when live rows were stored last
}

func newOwnSender(s *session) replaySender {
	return replaySender{
		publisher: s.publisher, stream: s.servers.stream, close: func() {}, window: s.cfg.Window,
		acks: newReplayAcks(), chunk: leastChunk,
	}
}

// send publishes a row for a request. A [*outbox.RowError] is the row's own.
func (l *replaySender) send(ctx context.Context, ev *outbox.Event, request int64) error {
	err := l.publisher.SendReplay(ctx, ev, request, l.acks)
	if err == nil {
		l.sent++
	}
	return err
}

// awaitSpare waits while others need the publisher's window.
func (l *replaySender) awaitSpare(ctx context.Context) error {
	for !l.publisher.HasSpare() {
		if err := l.publisher.Err(); err != nil {
			return err
		}
		if !sleep.For(ctx, time.Millisecond) {
			return ctx.Err()
		}
	}
	return nil
}

// awaitAcks waits until everything that was sent is stored.
func (l *replaySender) awaitAcks(ctx context.Context) error {
	for l.acks.stored.Load() < l.sent {
		select {
		case <-l.acks.news:
		case <-l.publisher.Failed():
			return l.publisher.Err()
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// adapt sets the size of the next chunk. live are the PubAcks of live rows so far.
func (l *replaySender) adapt(rows int, took time.Duration, live int64) {
	if live != l.live {
		l.live, l.busy = live, time.Now()
	}
	target := idleChunkTime
	if time.Since(l.busy) < time.Second {
		target = chunkTime
	}
	switch {
	case took > target:
		l.chunk = l.chunk * 3 / 4
	case rows == l.chunk:
		l.chunk += l.chunk / 4
	}
	l.chunk = max(min(max(l.chunk, leastChunk), mostChunk, l.window/4), 1)
}

// end is where the stream ends, behind everything that was sent.
func (l *replaySender) end(ctx context.Context) (*jetstream.StreamInfo, error) {
	info, err := l.stream.Info(ctx)
	if err == nil && info.LastSeq < l.publisher.LastSeq() {
		err = fmt.Errorf("stream %s ends before a message that it has acknowledged", l.stream.Name())
	}
	return info, err
}

// replayAcks counts PubAcks. The goroutine of the replies calls Stored.
type replayAcks struct {
	stored atomic.Int64
	last   atomic.Uint64 // greatest sequence
	news   chan struct{} // a token
}

func newReplayAcks() *replayAcks { return &replayAcks{news: make(chan struct{}, 1)} }

// Stored implements publish.Replayed.
func (a *replayAcks) Stored(seq uint64) {
	a.last.Store(max(a.last.Load(), seq))
	a.stored.Add(1)
	select {
	case a.news <- struct{}{}:
	default:
	}
}

func (a *replayAcks) sequence() uint64 { return a.last.Load() }
