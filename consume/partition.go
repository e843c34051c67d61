package consume

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/sleep"
)

// partition handles the events of one partition, one transaction after the other, in one goroutine.
type partition struct {
	*consumer
	key    int
	epoch  int64
	offset uint64
	// These are from when the partition was taken. created is when the stream was.
	anchor  anchor
	created *time.Time
	since   *time.Time // where the partition begins again in another stream; nil is at its first message
	begins  uint64     // where reading begins: behind the offset where the events between are gone
	queue   *queue
	// waiting are the aggregates with a parked event: later events are parked behind it.
	waiting map[string]bool
	// oneByOne is how many more events have a transaction each, after a batch failed.
	oneByOne          int
	committed, looked time.Time // when the offset was written, and when parked events were looked for
	cared             time.Time
	failing           bool
}

// failure is an error that says something of the event.
type failure struct{ error }

func (f failure) Unwrap() error { return f.error }

const (
	idlePause   = time.Second // between looks at what is parked, and at where the reader is
	firstPause  = 50 * time.Millisecond
	longestWait = 5 * time.Second
)

// run handles events until stop is done. A transaction that has begun then goes on until hard is.
func (p *partition) run(stop, hard context.Context) {
	defer p.forget()
	pause := firstPause
	for stop.Err() == nil {
		err := p.turn(hard, p.queue.wait(stop, p.handler.most))
		if errors.Is(err, errMoved) {
			err = p.reload(hard)
		}
		switch {
		case err == nil:
			pause = firstPause
			continue
		case errors.Is(err, errFenced), hard.Err() != nil:
			return
		}
		p.failing = true
		p.waits.set(p.what(), err)
		sleep.For(stop, pause)
		pause = min(2*pause, longestWait)
	}
	p.committed = time.Time{}
	_ = p.idle(hard) // the next owner reads a few events more where it fails
}

// forget leaves nothing of the partition in the log and in the metrics.
func (p *partition) forget() {
	p.waits.forget(p.what())
	if p.key == 0 {
		p.metrics.parked.Set(0)
		p.metrics.dead.Set(0)
	}
}

func (p *partition) what() string { return fmt.Sprintf("handle events of partition %d", p.key) }

// turn does the next thing that there is to do.
func (p *partition) turn(ctx context.Context, events []Event) error {
	if time.Since(p.looked) >= idlePause {
		if err := p.retryDue(ctx); err != nil {
			return err
		}
	}
	p.care(ctx)
	if len(events) == 0 {
		return p.idle(ctx)
	}
	isWaiting := func(e Event) bool { return p.waiting[e.aggregate()] }
	if isWaiting(events[0]) {
		n := slices.IndexFunc(events, func(e Event) bool { return !isWaiting(e) })
		if n > 0 {
			events = events[:n]
		}
		return p.parkBehind(ctx, events)
	}
	if n := slices.IndexFunc(events, isWaiting); n > 0 {
		events = events[:n]
	}
	if p.oneByOne > 0 {
		events = events[:1]
		p.oneByOne--
	}
	err := p.apply(ctx, events)
	var failed failure
	switch {
	case !errors.As(err, &failed):
		return err
	case len(events) > 1: // which of them it is shows when each has a transaction
		p.oneByOne = len(events)
		return nil
	}
	return p.park(ctx, events[0], failed)
}

// apply handles the events that were not handled before, and writes the offset.
func (p *partition) apply(ctx context.Context, events []Event) error {
	ids := make([]string, len(events))
	for i := range events {
		ids[i] = events[i].seenID(p.Name)
	}
	c, err := p.begin(ctx, ids)
	if err != nil {
		return err
	}
	defer func() { c.end() }()
	s := step{offset: events[len(events)-1].Sequence, anchor: events[len(events)-1].anchor()}
	var todo []Event
	for i, e := range events {
		if !c.seen[ids[i]] {
			c.seen[ids[i]] = true // it may be there twice
			todo = append(todo, e)
			s.ids, s.times = append(s.ids, ids[i]), append(s.times, timeText(e.StoredAt))
		}
	}
	if len(todo) > 0 {
		if c, err = p.call(ctx, c, todo); err != nil {
			return err
		}
	}
	if err := c.finish(ctx, s); err != nil {
		return p.judge(ctx, c, err)
	}
	p.settled(events, todo)
	return nil
}

// call runs the handler in the transaction. An external effect comes before its own: no lock is held
// meanwhile.
func (p *partition) call(ctx context.Context, c *claim, events []Event) (*claim, error) {
	if !p.handler.external {
		return c, p.judgeHandler(ctx, c, p.handle(ctx, c.txn, events))
	}
	c.end()
	if err := p.handle(ctx, nil, events); err != nil {
		return c, p.judgeHandler(ctx, nil, err)
	}
	next, err := p.begin(context.WithoutCancel(ctx), nil)
	if err != nil {
		return c, err
	}
	return next, nil
}

// judgeHandler tells a failure of the event from an error that says nothing of it. The end of a context that
// the handler made is the handler's affair, although it costs the connection.
func (p *partition) judgeHandler(ctx context.Context, c *claim, err error) error {
	own := errors.Is(err, errTimeout) || errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return err
	case !own && (outage(err) || c != nil && c.lost()):
		return err
	}
	return failure{err}
}

// judge does so for the statements behind the handler.
func (p *partition) judge(ctx context.Context, c *claim, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, errEnded), errors.Is(err, errAborted), errors.Is(err, errOpen):
		return failure{err}
	case ctx.Err() != nil, outage(err), c.lost():
		return err
	}
	return failure{err}
}

func (p *partition) settled(events, handled []Event) {
	p.committed = time.Now()
	p.queue.drop(p.offset)
	if p.failing {
		p.failing = false
		p.waits.over(p.what())
	}
	for i := range handled {
		p.metrics.processed(handled[i].Type)
	}
}

// idle moves the offset to where the reader is when no event waits: to where the next owner begins.
func (p *partition) idle(ctx context.Context) error {
	to, at := p.queue.covered()
	if to <= p.offset || time.Since(p.committed) < idlePause {
		return nil
	}
	c, err := p.begin(ctx, nil)
	if err != nil {
		return err
	}
	defer c.end()
	if err := c.finish(ctx, step{offset: to, anchor: at}); err != nil {
		return err
	}
	p.settled(nil, nil)
	return nil
}

const positionSQL = `SELECT o.epoch, o.last_processed_id FROM {offsets} o
	WHERE o.consumer_name = $1::text AND o.partition_key = $2::integer FOR UPDATE OF o`

// reload reads the offset after a commit without a reply. It waits for that commit's transaction.
func (p *partition) reload(ctx context.Context) error {
	var epoch, offset int64
	err := p.look(ctx, func(ctx context.Context, t txn) error {
		return one(ctx, t, p.sql(positionSQL), []any{p.Name, p.key}, &epoch, &offset)
	})
	switch {
	case errors.Is(err, errNoRow), err == nil && epoch != p.epoch:
		return errFenced
	case err != nil:
		return err
	}
	if uint64(offset) < p.offset {
		// The database has lost commits, and the queue has not the events behind them any more.
		return errFenced
	}
	p.offset, p.looked = uint64(offset), time.Time{} // the commit may have parked an event
	p.queue.drop(p.offset)
	return nil
}

// look runs statements without the lock of the partition's row. What f does not commit is rolled back.
func (p *partition) look(ctx context.Context, f func(ctx context.Context, t txn) error) error {
	ctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	t, err := p.handler.begin(ctx)
	if err != nil {
		return fmt.Errorf("begin transaction: %w", err)
	}
	defer t.end()
	return f(ctx, t)
}
