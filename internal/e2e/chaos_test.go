package e2e

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/walpost/walpost/internal/testenv"
)

// chaos says how much is broken during a load.
type chaos struct {
	rows     int
	kills    int // of the relay
	brokers  int // restarts of NATS, every other one by SIGKILL
	crashes  int // of PostgreSQL
	restarts int // of PostgreSQL
}

// TestTheLawHoldsOverCrashes: the relay is killed, the broker and the database
// are killed and restarted, each at random and often at the same time, under a
// load. The stream has a duplicate window of a second, and the relay stays down
// longer than that again and again.
//
// All the while an observer sees that the confirmed LSN passes no row that is
// not stored and marked.
func TestTheLawHoldsOverCrashes(t *testing.T) {
	testenv.Clusters(t, func(t *testing.T, pg *testenv.Postgres) {
		r := newRig(t, pg)
		d := &disturber{rig: r, chaos: sized(t, pg,
			chaos{rows: 100_000, kills: 20, brokers: 5, crashes: 3, restarts: 3},
			chaos{rows: 20_000, kills: 6, brokers: 2, crashes: 1, restarts: 1})}
		d.relay = r.keep("row_locked") // by lockRows
		r.awaitStreaming()
		d.observer = r.observe()
		d.load = r.newLoad()
		var writing sync.WaitGroup
		writing.Go(func() { d.load.run(t.Context()) })
		d.run(t.Context())
		d.load.complete(d.chaos.rows)
		writing.Wait()
		r.awaitSettled()
		d.observer.finish()
		d.relay.stop()
		t.Logf("%d lives of the relay, of which %d ended at once because a server was away", d.relay.lives, d.relay.gaveUp.Load())
		r.audit()
	})
}

// disturber breaks everything, in threads that know nothing of each other.
type disturber struct {
	*rig
	chaos    chaos
	relay    *keeper
	observer *observer
	load     *load
}

// The actors' sources of randomness; the writers have the first numbers.
const (
	actorRelay = 100 + iota
	actorBroker
	actorDatabase
	actorLocker
	actorObserver
)

// run returns when all that was to be broken has been, and is up again.
func (d *disturber) run(ctx context.Context) {
	begun := time.Now()
	var breaking, watching sync.WaitGroup
	breaking.Go(func() { d.killRelay(ctx, d.random(actorRelay)) })
	breaking.Go(func() { d.restartBroker(ctx, d.random(actorBroker)) })
	breaking.Go(func() { d.restartDatabase(ctx, d.random(actorDatabase)) })
	meanwhile, stop := context.WithCancel(ctx)
	defer stop()
	watching.Go(func() { d.lockRows(meanwhile, d.random(actorLocker)) })
	watching.Go(func() { d.watch(meanwhile, d.random(actorObserver)) })
	breaking.Wait()
	stop()
	watching.Wait()
	d.t.Logf("chaos took %s", time.Since(begun).Round(time.Millisecond))
}
