package consume

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
)

// feed brings the stream's events to the queues of the partitions that this process owns. One reader, the
// main one, serves all partitions that keep up. It waits for a full queue, but not for long: that partition
// leaves it and has its own reader, as have those that this process took over while it was reading. When such
// a reader has reached the main one, its partitions join that.
type feed struct {
	*consumer
	// fail ends the session.
	fail func(error)
	ctx  context.Context

	mu      sync.Mutex // guards all below, the readers and the queues
	queues  map[int]*queue
	main    *reader
	readers map[*reader]bool
	running sync.WaitGroup
}

// reader follows the stream for some partitions.
type reader struct {
	*feed
	cancel  context.CancelFunc
	members map[*queue]bool
	// pos: every event up to it is in its queue, or is of no member. last is the last message at or before
	// it.
	pos  uint64
	last anchor
	// jumped is the first of the sequences that were passed over since the last check, 0 for none.
	jumped uint64
	// blocked: it waits for a full queue. suspect is its position when the stream was found to begin behind
	// that.
	blocked bool
	suspect uint64    // 0: it was not
	checked time.Time // when the reader asked because of a jump; only its own goroutine uses it
}

// queue has the events of a partition that are not settled yet.
type queue struct {
	feed     *feed
	key      int
	events   []Event
	size     int    // of the events, in bytes
	received uint64 // the highest sequence that was in it
	reader   *reader
	filled   chan struct{} // has a token after an event came
	drained  chan struct{} // has a token after events went
}

const (
	// queueMost bounds a queue: events, and their bytes, headers included.
	queueMost  = 2000
	queueBytes = 16 << 20
	// patience is how long the main reader waits for a full queue.
	patience = time.Second
)

var errJoined = errors.New("the reader has reached the main one")

func newQueue(f *feed, key int) *queue {
	return &queue{feed: f, key: key, filled: make(chan struct{}, 1), drained: make(chan struct{}, 1)}
}

// start is where a partition's events begin.
type start struct {
	*queue
	offset uint64
	anchor anchor
}

// add begins to read for partitions. Those that are not behind the main reader join it, the others share a
// reader.
func (f *feed) add(starts []start) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.main != nil && len(f.main.members) == 0 {
		f.main.stop()
		f.main = nil
	}
	slices.SortFunc(starts, func(a, b start) int { return cmp.Compare(a.offset, b.offset) })
	var behind *reader
	for _, s := range starts {
		f.queues[s.key], s.received = s.queue, s.offset
		switch {
		case f.main == nil:
			f.main = f.read(s)
		case behind == nil && s.offset < f.main.pos:
			behind = f.read(s)
		case s.offset < f.main.pos:
			behind.take(s.queue)
		default:
			f.main.take(s.queue)
		}
	}
}

// remove ends the reading for a partition.
func (f *feed) remove(q *queue) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.queues, q.key)
	q.leave()
}

// leave is called with the lock. A reader without members is not needed; the main one waits for others.
func (q *queue) leave() {
	r := q.reader
	if r == nil {
		return
	}
	delete(r.members, q)
	if q.reader = nil; len(r.members) == 0 && r != r.main {
		r.stop()
	}
	notify(q.drained)
}

func (r *reader) take(q *queue) {
	r.members[q] = true
	q.reader = r
}

// stop is called with the lock.
func (r *reader) stop() {
	r.cancel()
	delete(r.readers, r)
}

// read starts a reader behind a partition's offset. It is called with the lock.
func (f *feed) read(s start) *reader {
	ctx, cancel := context.WithCancel(f.ctx)
	r := &reader{feed: f, cancel: cancel, members: map[*queue]bool{}, pos: s.offset, last: s.anchor}
	r.take(s.queue)
	f.readers[r] = true
	f.running.Go(func() {
		defer cancel()
		err := f.stream.Follow(ctx, jetstream.FollowOptions{
			From: s.offset + 1, Filters: f.definition.filters, Verify: r.verify,
			Waiting: func(err error) { f.waits.set("read the stream", err) },
		}, func(m jetstream.Received) error { return r.deliver(ctx, m) })
		if err != nil && ctx.Err() == nil && !errors.Is(err, errJoined) {
			f.fail(err)
		}
	})
	return r
}

// verify checks that the stream still has what this reader read last: a consumer that the client makes after
// a restore delivers what the restored stream has.
func (r *reader) verify(ctx context.Context) error {
	r.mu.Lock()
	pos, last := r.pos, r.last
	r.mu.Unlock()
	info, err := r.stream.Info(ctx)
	if err == nil {
		_, err = r.recognize(ctx, info, pos, last)
	}
	return err
}

// deliver puts an event into its partition's queue, and waits where that is full.
func (r *reader) deliver(ctx context.Context, m jetstream.Received) error {
	e := eventOf(m)
	if err := r.checkJump(ctx, e.Sequence); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	q, err := r.awaitSpace(ctx, e.Partition(r.Partitions))
	if err != nil {
		return err
	}
	taken := r.Replays || e.ReplayOf == ""
	if taken && q != nil && q.reader == r && e.Sequence > q.received {
		q.events, q.received = append(q.events, e), e.Sequence
		q.size += e.size()
		notify(q.filled)
	}
	if e.Sequence > r.pos {
		r.pos, r.last = e.Sequence, e.anchor()
	}
	return r.join()
}

// checkJump looks at sequences that were passed over. Without filters they are gone: by the stream's limits,
// and then before anything behind them is handled, or one by one, as an operator deletes messages. In a
// stream with many holes the next look of the watch has to do.
func (r *reader) checkJump(ctx context.Context, seq uint64) error {
	r.mu.Lock()
	pos := r.pos
	r.mu.Unlock()
	if seq <= pos+1 {
		return nil
	}
	if len(r.definition.filters) > 0 || time.Since(r.checked) < time.Second {
		r.jump(pos + 1)
		return nil
	}
	r.checked = time.Now()
	info, err := r.stream.Info(ctx)
	if err != nil {
		r.jump(pos + 1)
		return nil //nolint:nilerr // the next look of the watch has to do
	}
	if info.FirstSeq > pos+1 {
		return r.gap(pos+1, min(info.FirstSeq, seq)-1)
	}
	return nil
}

// awaitSpace is called with the lock, and gives it up while it waits. It returns the partition's queue, nil
// where this process has not the partition, when that has space or has left the reader. The main reader
// without a member waits for one.
func (r *reader) awaitSpace(ctx context.Context, key int) (*queue, error) {
	deadline := time.Now().Add(patience)
	for {
		q := r.queues[key]
		idle := r == r.main && len(r.members) == 0
		if !idle && (q == nil || q.reader != r || !q.full()) {
			return q, ctx.Err()
		}
		alone := r != r.main && len(r.members) == 1
		if !idle && !alone && time.Now().After(deadline) {
			r.part(q)
			continue
		}
		if err := r.pause(ctx, q); err != nil {
			return nil, err
		}
	}
}

// pause gives the lock up until the queue may have space.
func (r *reader) pause(ctx context.Context, q *queue) error {
	var drained chan struct{}
	if q != nil {
		drained = q.drained
	}
	r.blocked = true
	r.mu.Unlock()
	timer := time.NewTimer(patience)
	select {
	case <-drained:
	case <-timer.C:
	case <-ctx.Done():
	}
	timer.Stop()
	r.mu.Lock()
	r.blocked = false
	return ctx.Err()
}

// part starts another reader for a full queue, from this one's position on.
func (r *reader) part(q *queue) {
	delete(r.members, q)
	r.read(start{queue: q, offset: r.pos, anchor: r.last})
}

// join hands the members to the main reader when this one has reached it.
func (r *reader) join() error {
	if r == r.main || r.main == nil || r.pos < r.main.pos {
		return nil
	}
	for q := range r.members {
		r.main.take(q)
	}
	clear(r.members)
	r.stop()
	return errJoined
}

func (q *queue) full() bool { return len(q.events) >= queueMost || q.size >= queueBytes }

// wait returns up to so many events, the same ones until they are dropped, or none after a second.
func (q *queue) wait(ctx context.Context, most int) []Event {
	timer := time.NewTimer(idlePause)
	defer timer.Stop()
	for {
		q.feed.mu.Lock()
		events := slices.Clone(q.events[:min(most, len(q.events))])
		q.feed.mu.Unlock()
		if len(events) > 0 {
			return events
		}
		select {
		case <-q.filled:
		case <-timer.C:
			return nil
		case <-ctx.Done():
			return nil
		}
	}
}

// drop forgets the events up to an offset: they are settled.
func (q *queue) drop(offset uint64) {
	q.feed.mu.Lock()
	defer q.feed.mu.Unlock()
	for len(q.events) > 0 && q.events[0].Sequence <= offset {
		q.size -= q.events[0].size()
		q.events[0] = Event{} // nothing else keeps what it has
		q.events = q.events[1:]
	}
	notify(q.drained)
}

// covered is how far the partition's events are settled where none waits.
func (q *queue) covered() (uint64, anchor) {
	q.feed.mu.Lock()
	defer q.feed.mu.Unlock()
	if len(q.events) > 0 || q.reader == nil {
		return 0, anchor{}
	}
	return q.reader.pos, q.reader.last
}

func notify(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
