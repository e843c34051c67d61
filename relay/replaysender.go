package relay

import (
	"cmp"
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// A replay has one chunk of rows in flight. A live row waits behind it. While live rows come, a chunk may
// therefore take chunkTime, or half as long again as one of few rows takes, no more than busyRate rows a
// second go out, and few are read at once: the servers need time for the others.
const (
	leastChunk    = 16
	mostChunk     = 1024
	chunkTime     = 250 * time.Microsecond
	idleChunkTime = 20 * time.Millisecond
	busyRate      = 56_000
	// lateMost is how much of its rate a replay may make up for.
	lateMost = 10 * time.Millisecond
	// Of so many chunks one has few rows.
	probeEvery = 64
	// So many rows are read at once while live rows come, and while none come.
	busyPortion = 100
	idlePortion = 1000
)

// replaySender is the publisher of a replay: the session's, or one of another stream.
type replaySender struct {
	publisher *publish.Publisher
	stream    *jetstream.Stream
	like      *Likenesses // of its messages
	close     func()
	window    int // of the publisher
	acks      *replayAcks
	sent      int64

	chunk  int           // rows
	chunks int           // so far
	least  time.Duration // what a chunk of few rows takes
	live   int64
	busy   time.Time // when live rows were stored last
	next   time.Time // when the next chunk may go, see pause
}

func newOwnSender(s *session) replaySender {
	return replaySender{
		publisher: s.publisher, stream: s.servers.stream, like: s.recovered.like, close: func() {},
		window: s.cfg.Window, acks: newReplayAcks(), chunk: leastChunk,
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

// isBusy reports whether live rows come.
func (l *replaySender) isBusy() bool { return time.Since(l.busy) < time.Second }

// portion is how many rows are read at once.
func (l *replaySender) portion() int {
	if l.isBusy() {
		return busyPortion
	}
	return idlePortion
}

// pause leaves the servers time for live rows, while they come. A pause that took too long shortens the
// next ones.
func (l *replaySender) pause(ctx context.Context, rows int) {
	if !l.isBusy() {
		return
	}
	now := time.Now()
	if late := now.Add(-lateMost); l.next.Before(late) {
		l.next = late
	}
	l.next = l.next.Add(time.Duration(rows) * time.Second / busyRate)
	if wait := l.next.Sub(now); wait > 0 {
		sleep.For(ctx, wait)
	}
}

// size is how many rows the next chunk has at most.
func (l *replaySender) size() int {
	if l.chunks++; l.chunks%probeEvery == 0 {
		return min(l.chunk, leastChunk)
	}
	return l.chunk
}

// adapt sets the size of the next chunk. live are the PubAcks of live rows so far.
func (l *replaySender) adapt(rows int, took time.Duration, live int64) {
	if live != l.live {
		l.live, l.busy = live, time.Now()
	}
	if rows <= leastChunk {
		l.least = min(took, cmp.Or(l.least*5/4, took))
	}
	target := idleChunkTime
	if l.isBusy() {
		target = max(chunkTime, l.least*3/2)
	}
	switch {
	case took > target:
		l.chunk = l.chunk * 3 / 4
	case rows == l.chunk:
		l.chunk += l.chunk/4 + 1
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
