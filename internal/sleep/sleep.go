// Package sleep pauses a goroutine for as long as its context allows.
package sleep

import (
	"context"
	"time"
)

// For sleeps for d. It reports false, and returns at once, where ctx is done first.
func For(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
