package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
)

// fault breaks one thing, and mends it where nothing else does.
type fault struct {
	name   string
	weight int
	do     func(*conductor, context.Context) error
}

var faults = []fault{
	{"service killed", 4, kill("service")},
	{"relay killed", 4, kill("relay")},
	{"read model killed", 4, kill("read-model")},
	{"payment killed", 4, kill("payment")},
	{"audit killed", 2, kill("audit")},
	{"read model frozen", 2, freeze("read-model")},
	{"connections ended", 4, (*conductor).endConnections},
	{"NATS killed", 3, func(c *conductor, ctx context.Context) error {
		return errors.Join(c.nats.Kill(), c.nats.Start(ctx))
	}},
	{"PostgreSQL crashed", 2, func(c *conductor, ctx context.Context) error {
		return errors.Join(c.pg.Stop(ctx, testenv.Immediate), c.pg.Start(ctx))
	}},
	{"stream rolled back", 1, (*conductor).rollBack},
	{"stream recreated", 1, (*conductor).recreate},
}

// breakThings does one fault after the other until ctx is done, the first one at once.
func (c *conductor) breakThings(ctx context.Context) {
	all := 0
	for _, f := range faults {
		all += f.weight
	}
	pause := time.Duration(0)
	for c.options.faults > 0 && sleep.For(ctx, pause) {
		pause = c.options.faults/2 + rand.N(c.options.faults)
		n := rand.IntN(all)
		for _, f := range faults {
			if n -= f.weight; n < 0 {
				c.doFault(ctx, f)
				break
			}
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.revive(); err != nil {
		c.say("%v", err)
	}
}

func (c *conductor) doFault(ctx context.Context, f fault) {
	c.mu.Lock()
	defer c.mu.Unlock()
	err := f.do(c, context.WithoutCancel(ctx)) // what is broken is mended
	if err = errors.Join(err, c.revive()); err != nil {
		c.say("%s: %v", f.name, err)
	}
	c.faults[f.name]++
}

func kill(name string) func(*conductor, context.Context) error {
	return func(c *conductor, _ context.Context) error { return c.running[name].program.Kill() }
}

func freeze(name string) func(*conductor, context.Context) error {
	return func(c *conductor, ctx context.Context) error {
		p := c.running[name].program
		err := p.Signal(syscall.SIGSTOP)
		sleep.For(ctx, rand.N(2*time.Second))
		return errors.Join(err, p.Signal(syscall.SIGCONT))
	}
}

// endConnections ends a third of PostgreSQL's, the relay's and those that hold locks among them.
func (c *conductor) endConnections(ctx context.Context) error {
	_, err := c.pool.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid() AND pid % 3 = $1`, rand.IntN(3))
	return err
}

// rollBack brings the stream's store back to its state of a moment before. The relay notices, and stores the
// rest again.
func (c *conductor) rollBack(ctx context.Context) error {
	backup := filepath.Join(c.dir, "store")
	err := errors.Join(os.RemoveAll(backup), c.nats.Stop(ctx), c.nats.SnapshotStore(backup),
		c.nats.Start(ctx))
	sleep.For(ctx, rand.N(time.Second))
	err = errors.Join(err, c.nats.Stop(ctx), c.nats.RestoreStore(backup), c.nats.Start(ctx))
	return errors.Join(err, os.RemoveAll(backup))
}

// recreate deletes the stream and makes an empty one. What was in it and not consumed is gone: `walpost
// verify --repair` has the relay store the rows since then again. The relay is down meanwhile: later events
// of the same orders would come first.
func (c *conductor) recreate(ctx context.Context) error {
	if err := c.running["relay"].program.Kill(); err != nil {
		return err
	}
	since := c.unconsumed(ctx)
	c.recreated = time.Now()
	if err := c.js.DeleteStream(ctx, streamName); err != nil {
		return err
	}
	if err := c.createStream(ctx); err != nil {
		return err
	}
	return c.repair(ctx, since)
}

// unconsumed is since when the stream has messages that some consumer has not handled, or longer.
func (c *conductor) unconsumed(ctx context.Context) time.Duration {
	// A consumer that has moved on so long after the stream was recreated reads the new one.
	const margin, switched = 10 * time.Second, 30 * time.Second
	// What was not consumed before the stream was recreated has been made pending then.
	most := time.Since(c.recreated) + margin
	var handled uint64
	var moved time.Time
	err := c.pool.QueryRow(ctx, `SELECT min(last_processed_id), min(last_processed_at)
		FROM consumer_offsets`).Scan(&handled, &moved)
	if err != nil || moved.Before(c.recreated.Add(switched)) {
		return most
	}
	s, err := c.js.Stream(ctx, streamName)
	if err != nil {
		return most
	}
	m, err := s.GetMsg(ctx, handled+1)
	switch {
	case err == nil:
		return min(time.Since(m.Time)+margin, most)
	case handled == s.CachedInfo().State.LastSeq:
		return margin
	}
	return most // the offsets are those of an earlier stream
}

// repairPatience is how long repairs may take: each reads the whole stream, and the last one finds nothing.
const repairPatience = 15 * time.Minute

// repair runs until it has succeeded: other faults may have left the servers busy.
func (c *conductor) repair(ctx context.Context, since time.Duration) (err error) {
	for begun := time.Now(); time.Since(begun) < repairPatience; sleep.For(ctx, time.Second) {
		var out []byte
		command := c.walpostCommand("verify", "--repair", "--since", since.String())
		if out, err = command.CombinedOutput(); err == nil {
			return nil
		}
		err = fmt.Errorf("walpost verify --repair: %w\n%s", err, out)
	}
	return err
}
