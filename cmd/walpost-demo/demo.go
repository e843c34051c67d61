package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/nats-io/nats.go/jetstream"
)

// demo runs from the first server's start to the last one's end. When ctx is done
// the load ends, and the summary follows.
func demo(ctx context.Context, o options, s *screen, stdin io.Reader) (v verdict, err error) {
	s.intro(o)
	r := &round{options: o, screen: s, acks: newAcks()}
	r.env, err = startEnvironment(ctx, s, r.acks.observe)
	defer func() { err = errors.Join(err, r.end()) }()
	if err == nil {
		r.shop, err = openShop(ctx, r.env.url)
	}
	if err != nil {
		if ctx.Err() != nil {
			err = errors.New("interrupted before there was anything to count")
		}
		return v, err
	}
	s.ready(r.env.workspace())
	if err := r.load(ctx); err != nil {
		return v, err
	}
	if v, err = r.count(ctx); err != nil {
		return v, err
	}
	s.summary(v, r.snapshot(), r.shop.commits.percentiles())
	if o.keep && ctx.Err() == nil {
		s.println(v.String())
		if err := r.keep(ctx, stdin); err != nil {
			return v, err
		}
		v, err = r.count(ctx)
		s.again(v)
	}
	return v, err
}

// round is one run of the demo.
type round struct {
	options
	screen *screen
	env    *environment
	shop   *shop
	acks   *acks
	live   *tally
	begun  time.Time
	took   time.Duration
}

// load lets the shop write, and shows how it goes.
func (r *round) load(ctx context.Context) error {
	r.live = newTally()
	stop, err := follow(context.WithoutCancel(ctx), r.env.js, jetstream.DeliverAllPolicy, r.live.add)
	if err != nil {
		return err
	}
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, r.duration)
	defer cancel()
	r.begun = time.Now()
	done := make(chan error, 1)
	go func() { done <- r.shop.run(ctx, r.rate) }()
	tick := time.NewTicker(r.screen.interval())
	defer tick.Stop()
	for {
		select {
		case err := <-done:
			r.took = time.Since(r.begun)
			return err
		case <-tick.C:
			r.screen.show(r.snapshot())
		}
	}
}

// snapshot is the load at one moment.
type snapshot struct {
	options
	elapsed                          time.Duration
	events, transactions, rolledBack int
	counts                           counts
	latency                          percentiles
}

func (r *round) snapshot() snapshot {
	elapsed := r.took
	if elapsed == 0 {
		elapsed = time.Since(r.begun)
	}
	return snapshot{
		options:      r.options,
		elapsed:      elapsed,
		events:       int(r.shop.events.Load()),
		transactions: int(r.shop.transactions.Load()),
		rolledBack:   int(r.shop.rolledBack.Load()),
		counts:       r.live.counts(),
		latency:      r.acks.percentiles(),
	}
}

// count reads everything from the beginning.
func (r *round) count(ctx context.Context) (verdict, error) {
	r.screen.working("reading the whole stream and comparing it with the table")
	v, err := r.env.verdict(context.WithoutCancel(ctx))
	v.latency = r.acks.percentiles()
	return v, err
}

// end leaves nothing behind.
func (r *round) end() error {
	r.screen.working("stopping")
	var err error
	if r.shop != nil {
		err = r.shop.close()
	}
	return errors.Join(err, r.env.close())
}

// acks are the times from commit to PubAck, as the relay reports them.
type acks struct {
	latency
	// recent are those that have not been shown yet, in the stream's order. Where
	// there are too many the newest is dropped.
	recent chan time.Duration
}

func newAcks() *acks { return &acks{recent: make(chan time.Duration, 1024)} }

func (a *acks) observe(d time.Duration) {
	a.latency.observe(d)
	select {
	case a.recent <- d:
	default:
	}
}

func (a *acks) drain() {
	for len(a.recent) > 0 {
		<-a.recent
	}
}
