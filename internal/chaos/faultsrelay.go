package main

import (
	"context"
	"math"
	"math/rand/v2"
	"syscall"
	"time"
)

// setClock has a relay believe in another time, from then on: seconds or weeks away.
func setClock(ctx context.Context, w *world, rng *rand.Rand) error {
	by := time.Duration(math.Exp(rng.Float64()*14) * float64(time.Second))
	if rng.IntN(2) == 0 {
		by = -by
	}
	return w.anyRelay(rng).setClock(by)
}

func (w *world) anyRelay(rng *rand.Rand) *relay { return w.relays[rng.IntN(len(w.relays))] }

// down kills the relay and keeps it down.
func (r *relay) down(meanwhile func()) error {
	r.up.Lock()
	defer r.up.Unlock()
	err := r.life.Kill()
	meanwhile()
	return err
}

func (r *relay) stopped(meanwhile func()) error {
	r.up.Lock()
	defer r.up.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := r.life.Stop(ctx); err != nil {
		r.stuck.Store(true)
		return err
	}
	meanwhile()
	return nil
}

func (r *relay) frozen(meanwhile func()) error {
	r.up.Lock()
	life := r.life
	r.up.Unlock()
	if err := life.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	meanwhile()
	_ = life.Signal(syscall.SIGCONT)
	select {
	case <-life.Done():
		return errNotNow // it had ended by itself
	default:
		return nil
	}
}
