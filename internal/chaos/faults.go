package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
)

// fault breaks something and mends it.
type fault struct {
	name string
	// of is what it is about: two faults of one thing do not come together.
	of string
	// able tells whether the world can have it, now.
	able func(*world) bool
	do   func(context.Context, *world, *rand.Rand) error
}

const (
	ofRelay    = "relay"
	ofPostgres = "PostgreSQL"
	ofBroker   = "NATS"
	ofTable    = "table"
	ofLinks    = "links"
	ofMachine  = "machine"
)

func always(*world) bool { return true }

func oneBroker(w *world) bool { return w.cluster == nil }

func clustered(w *world) bool { return w.cluster != nil }

func promotable(w *world) bool { return w.replica != nil && !w.promoted.Load() }

func streams(w *world) bool { return w.mode != "poll" }

// settledServers: what was committed there, or stored, is not taken back.
func settledServers(w *world) bool { return !w.rollback && (w.replica == nil || w.promoted.Load()) }

var faults = []fault{
	{"relay killed", ofRelay, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.anyRelay(rng).down(func() { sleep.For(ctx, between(rng, 0, 2*time.Second)) })
	}},
	{"relay frozen", ofRelay, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.anyRelay(rng).frozen(func() {
			sleep.For(ctx, between(rng, 100*time.Millisecond, 14*time.Second))
		})
	}},
	{"relay stopped", ofRelay, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.anyRelay(rng).stopped(func() { sleep.For(ctx, between(rng, 0, 2*time.Second)) })
	}},
	{"relay clock set", ofRelay, always, setClock},
	{"PostgreSQL crashed", ofPostgres, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.restartPostgres(ctx, rng, testenv.Immediate)
	}},
	{"PostgreSQL restarted", ofPostgres, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.restartPostgres(ctx, rng, testenv.Fast)
	}},
	{"standby promoted", ofPostgres, promotable, promote},
	{"walsender terminated", ofPostgres, streams, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.some(ctx, terminateWalsender, slotName)
	}},
	{"sessions terminated", ofPostgres, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.some(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name LIKE 'walpost%'`)
	}},
	{"slot dropped", ofPostgres, streams, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return dropSlot(ctx, w)
	}},
	{"slot invalidated", ofPostgres, streams, invalidateSlot},
	{"table altered", ofTable, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.lockedTable(ctx, func(tx pgx.Tx) error {
			w.columns++
			column := fmt.Sprintf("ADD COLUMN more%d int DEFAULT 7", w.columns)
			_, err := tx.Exec(ctx, `ALTER TABLE outbox_messages `+column+`; ALTER TABLE history `+column)
			sleep.For(ctx, between(rng, 100*time.Millisecond, 4*time.Second))
			return err
		})
	}},
	{"rows locked", ofTable, always, lockRows},
	{"ids reused", ofTable, func(w *world) bool { return settledServers(w) && !w.journals() }, truncate},
	{"NATS killed", ofBroker, oneBroker, func(ctx context.Context, w *world, rng *rand.Rand) error {
		n := w.brokers[0]
		if err := n.Kill(); err != nil {
			return err
		}
		sleep.For(ctx, between(rng, 0, 3*time.Second))
		return n.Start(ctx)
	}},
	{"NATS frozen", ofBroker, always, func(ctx context.Context, w *world, rng *rand.Rand) error {
		n := w.brokers[rng.IntN(len(w.brokers))]
		if err := n.Pause(); err != nil {
			return err
		}
		sleep.For(ctx, between(rng, 100*time.Millisecond, 8*time.Second))
		return n.Resume()
	}},
	{"NATS restarted", ofBroker, oneBroker, func(ctx context.Context, w *world, rng *rand.Rand) error {
		return w.brokers[0].Restart(ctx)
	}},
	{"store rolled back", ofBroker, func(w *world) bool { return w.rollback }, rollBack},
	{"NATS node killed", ofBroker, clustered, func(ctx context.Context, w *world, rng *rand.Rand) error {
		n := w.brokers[rng.IntN(len(w.brokers))]
		if err := n.Kill(); err != nil {
			return err
		}
		sleep.For(ctx, between(rng, 0, 5*time.Second))
		return n.Start(ctx)
	}},
	{"NATS leader stepped down", ofBroker, clustered, stepDown},
	{"NATS cluster down", ofBroker, clustered, func(ctx context.Context, w *world, rng *rand.Rand) error {
		for _, n := range w.brokers {
			if err := n.Kill(); err != nil {
				return err
			}
		}
		sleep.For(ctx, between(rng, 0, 3*time.Second))
		for _, n := range w.brokers {
			if err := n.Start(ctx); err != nil {
				return err
			}
		}
		return nil
	}},
	{"stream full", ofBroker, always, fill},
	{anotherWriter, ofBroker, always, publishAsOther},
	{"message deleted", ofTable, settledServers, deleteMessage},
	{"links cut", ofLinks, always, links(func(p *testenv.Proxy) { p.Cut() }, 5*time.Second)},
	{"links dropped", ofLinks, always, links(func(p *testenv.Proxy) { p.Drop() }, 0)},
	{"links half open", ofLinks, always, links(func(p *testenv.Proxy) { p.Pause() }, 14*time.Second)},
	{"links slow", ofLinks, always, links(slow, 5*time.Second)},
	{"processors taken away", ofMachine, always, starve},
}

// between draws from a range of durations, short ones as often as long ones.
func between(rng *rand.Rand, least, most time.Duration) time.Duration {
	x := rng.Float64()
	return least + time.Duration(x*x*float64(most-least))
}

func slow(p *testenv.Proxy) { p.Slow(20 * time.Millisecond) }

// links breaks the ways to PostgreSQL, to NATS, or both.
func links(how func(*testenv.Proxy), most time.Duration) func(context.Context, *world, *rand.Rand) error {
	return func(ctx context.Context, w *world, rng *rand.Rand) error {
		all := [][]*testenv.Proxy{w.pgProxies, w.natsProxies, slices.Concat(w.pgProxies, w.natsProxies)}
		which := all[rng.IntN(len(all))]
		for _, p := range which {
			how(p)
		}
		sleep.For(ctx, between(rng, 0, most))
		for _, p := range which {
			p.Resume()
		}
		return nil
	}
}

var errNotNow = errors.New("not now")
