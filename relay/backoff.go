package relay

import (
	"context"
	"math/rand/v2"
	"time"

	"github.com/walpost/walpost/internal/sleep"
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
	sleep.For(ctx, b.next/2+rand.N(b.next/2+1))
	b.next *= 2
}
