package relay

import (
	"context"
	"math/rand/v2"
	"time"
)

// backoff grows from least to most while failures follow each other closely.
type backoff struct {
	least, most, next time.Duration
}

// reset begins again with the least, where what failed had got something done.
func (b *backoff) reset() { b.next = 0 }

// wait sleeps, half of it at random so that relays do not march in step.
func (b *backoff) wait(ctx context.Context) {
	b.next = max(b.least, min(b.next, b.most))
	sleep(ctx, b.next/2+rand.N(b.next/2+1))
	b.next *= 2
}

// sleep reports false where ctx ended it.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
