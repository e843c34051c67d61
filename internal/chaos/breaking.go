package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/sleep"
)

// breaking breaks things until there were enough faults, and returns when all is
// mended.
type breaking struct {
	w      *world
	rng    *rand.Rand
	only   []string
	result *result
	mu     sync.Mutex
	after  bool // a fault before was not recovered from yet
}

func (b *breaking) run(ctx context.Context, least int) error {
	for n := 0; n < least && ctx.Err() == nil; {
		picked := b.pick()
		if len(picked) == 0 {
			return fmt.Errorf("no fault of %q can be had", strings.Join(b.only, ","))
		}
		var all sync.WaitGroup
		var done []string
		var failed error
		for _, f := range picked {
			rng := rand.New(rand.NewPCG(b.rng.Uint64(), 0))
			delay := between(rng, 0, time.Second)
			all.Go(func() {
				if len(picked) > 1 {
					sleep.For(ctx, delay)
				}
				b.w.log("%s", f.name)
				err := f.do(ctx, b.w, rng)
				b.mu.Lock()
				defer b.mu.Unlock()
				switch {
				case err == nil:
					b.result.Faults[f.name]++
					done = append(done, f.name)
					n++
				case !errors.Is(err, errNotNow) && mends(f):
					failed = fmt.Errorf("%s: %w", f.name, err)
				default:
					b.w.log("%s: not this time: %v", f.name, err)
				}
			})
		}
		all.Wait()
		if failed != nil {
			return failed
		}
		if len(picked) > 1 && b.rng.IntN(2) == 0 {
			b.after = true
			sleep.For(ctx, between(b.rng, 0, time.Second))
			continue // the next ones come while it recovers
		}
		if len(picked) > 1 || b.after {
			done = nil // whose recovery it was, nobody can tell
		}
		if err := b.recovered(ctx, done); err != nil {
			return err
		}
		b.after = false
		sleep.For(ctx, between(b.rng, 0, 500*time.Millisecond))
	}
	return nil
}

// mends reports whether a fault that fails leaves something broken.
func mends(f fault) bool {
	return f.of == ofBroker || strings.HasPrefix(f.name, "PostgreSQL ") || f.name == "standby promoted"
}

// pick draws one fault, or two of different things.
func (b *breaking) pick() (picked []fault) {
	able := slices.DeleteFunc(slices.Clone(faults), func(f fault) bool {
		asked := slices.Contains(b.only, f.name)
		return !f.able(b.w) || !asked && (len(b.only) > 0 || f.name == anotherWriter)
	})
	if len(able) == 0 {
		return nil
	}
	picked = append(picked, able[b.rng.IntN(len(able))])
	if other := able[b.rng.IntN(len(able))]; b.rng.IntN(2) == 0 && other.of != picked[0].of {
		picked = append(picked, other)
	}
	return picked
}

// recovered waits until what is committed now is stored and marked, but for delayed
// and failed rows.
func (b *breaking) recovered(ctx context.Context, after []string) error {
	begun := time.Now()
	var last int64
	err := b.w.until(ctx, "the database answers", func(ctx context.Context) error {
		return b.w.query(ctx, `SELECT coalesce(max(id), 0) FROM outbox_messages`, nil, &last)
	})
	if err != nil {
		return err
	}
	err = b.w.until(ctx, "what was committed is delivered", func(ctx context.Context) error {
		var left int
		err := b.w.query(ctx, `SELECT count(*)::int FROM outbox_rows
			WHERE processed_at IS NULL AND last_error IS NULL AND available_at < now() AND id <= $1`,
			[]any{last}, &left)
		if err == nil && left > 0 {
			return fmt.Errorf("%d rows are pending", left)
		}
		return err
	})
	if err == nil && len(after) == 1 {
		b.result.Recoveries[after[0]] = append(b.result.Recoveries[after[0]], time.Since(begun))
	}
	if err != nil || !b.w.lossy.Load() {
		return err
	}
	// Rows that are marked say nothing here. What is stored after a loss comes after the comparison.
	err = b.w.until(ctx, "the relay compares table and stream", func(ctx context.Context) error {
		last, err := b.w.lastSeq(ctx)
		if err == nil && last <= b.w.restored {
			return fmt.Errorf("the stream ends at %d", last)
		}
		return err
	})
	if err == nil {
		b.w.lossy.Store(false)
	}
	return err
}
