package e2e

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// killRelay kills the relay, most often while it is sending, sometimes while it
// is still starting. Every other time it stays down for longer than the
// duplicate window, and everybody can see what it has left behind.
func (d *disturber) killRelay(ctx context.Context, rng *rand.Rand) {
	for i := range d.chaos.kills {
		if rng.IntN(4) == 0 {
			sleep(ctx, between(rng, 0, 500*time.Millisecond))
		} else {
			d.awaitFlow(ctx, rng)
		}
		down := between(rng, 0, 100*time.Millisecond)
		if i%2 == 0 {
			d.kill(ctx, func() { d.observer.glance(ctx, "after a kill"); sleep(ctx, window+down) })
			continue
		}
		d.kill(ctx, func() { sleep(ctx, down) })
	}
}

func (d *disturber) kill(ctx context.Context, meanwhile func()) {
	for ctx.Err() == nil && !d.relay.kill(meanwhile) {
		sleep(ctx, 10*time.Millisecond)
	}
}

// awaitFlow asks for rows and waits until some of them, or others, are stored:
// what is broken then is broken in the middle of something.
func (d *disturber) awaitFlow(ctx context.Context, rng *rand.Rand) {
	c := d.chaos
	rows := c.rows / (c.kills + c.brokers + c.crashes + c.restarts)
	rows = rows/2 + rng.IntN(rows)
	d.load.ask(rows)
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	some := 1 + rng.Uint64N(uint64(rows))
	before, known := d.lastSeq(ctx)
	for sleep(ctx, time.Millisecond) {
		now, ok := d.lastSeq(ctx)
		if ok && !known {
			before, known = now, true
		}
		if ok && now >= before+some {
			return
		}
	}
	d.t.Logf("%d messages were not stored within a minute", some)
}

// lastSeq reports false while the broker is away.
func (d *disturber) lastSeq(ctx context.Context) (uint64, bool) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	s, err := d.js.Stream(ctx, streamName)
	if err != nil {
		return 0, false
	}
	return s.CachedInfo().State.LastSeq, true
}

// restartBroker stops NATS, or has it hang and crash. What the relay has been
// told by then, the observer can see before the relay itself can.
func (d *disturber) restartBroker(ctx context.Context, rng *rand.Rand) {
	for i := range d.chaos.brokers {
		sleep(ctx, between(rng, 2*time.Second, 8*time.Second))
		d.awaitFlow(ctx, rng)
		if i%2 == 0 {
			d.check("pause NATS", d.nats.Pause())
			sleep(ctx, between(rng, 0, 2*time.Second))
			d.relay.freeze(func() {
				d.check("kill NATS", d.nats.Kill())
				d.check("start NATS", d.nats.Start(ctx))
				d.observer.glance(ctx, "after the broker's crash")
			})
			continue
		}
		d.check("stop NATS", d.nats.Stop(ctx))
		sleep(ctx, between(rng, 0, 2*time.Second))
		d.check("start NATS", d.nats.Start(ctx))
	}
}

func (d *disturber) check(what string, err error) {
	if err != nil {
		d.t.Errorf("%s: %v", what, err)
	}
}

func (d *disturber) restartDatabase(ctx context.Context, rng *rand.Rand) {
	var modes []testenv.StopMode
	for range d.chaos.crashes {
		modes = append(modes, testenv.Immediate)
	}
	for range d.chaos.restarts {
		modes = append(modes, testenv.Fast)
	}
	rng.Shuffle(len(modes), func(i, j int) { modes[i], modes[j] = modes[j], modes[i] })
	for _, mode := range modes {
		sleep(ctx, between(rng, 2*time.Second, 8*time.Second))
		d.awaitFlow(ctx, rng)
		d.stopDatabase(ctx, mode)
		sleep(ctx, between(rng, 0, time.Second))
		d.check("start PostgreSQL", d.pg.Start(ctx))
	}
}

func (d *disturber) stopDatabase(ctx context.Context, mode testenv.StopMode) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	begun := time.Now()
	d.check("stop PostgreSQL", d.pg.Stop(ctx, mode))
	if took := time.Since(begun); took > 5*time.Second {
		d.t.Logf("PostgreSQL took %s to stop", took.Round(time.Millisecond))
	}
}
