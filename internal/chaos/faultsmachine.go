package main

import (
	"context"
	"math/rand/v2"
	"syscall"
	"time"

	"github.com/walpost/walpost/internal/sleep"
)

// A starved process runs for a tenth of the time.
const (
	starvedFor = 45 * time.Millisecond
	runsFor    = 5 * time.Millisecond
)

// starve takes the processors away from the relays, from PostgreSQL, from NATS, or from all of them. Whatever
// another fault has ended takes no signal.
func starve(ctx context.Context, w *world, rng *rand.Rand) error {
	const relays, postgres, brokers, all = 1, 2, 4, 7
	which := []int{relays, postgres, brokers, all}[rng.IntN(4)]
	end := time.Now().Add(between(rng, time.Second, 10*time.Second))
	for time.Now().Before(end) && ctx.Err() == nil {
		var signal []func(syscall.Signal) error
		if which&relays != 0 {
			for _, r := range w.relays {
				if r.up.TryLock() { // it is not kept down
					signal = append(signal, r.life.Signal)
					r.up.Unlock()
				}
			}
		}
		if which&postgres != 0 {
			signal = append(signal, w.server().Signal)
		}
		if which&brokers != 0 {
			for _, n := range w.brokers {
				signal = append(signal, n.Signal)
			}
		}
		for _, step := range []struct {
			signal syscall.Signal
			lasts  time.Duration
		}{{syscall.SIGSTOP, starvedFor}, {syscall.SIGCONT, runsFor}} {
			for _, send := range signal {
				_ = send(step.signal)
			}
			sleep.For(ctx, step.lasts)
		}
	}
	return nil
}
