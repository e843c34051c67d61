package sleep

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

func TestFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		if slept := For(ctx, 20*time.Second); !slept || time.Since(began) != 20*time.Second {
			t.Errorf("slept %t for %s, want true for 20s", slept, time.Since(began))
		}
		if slept := For(ctx, time.Hour); slept || time.Since(began) != time.Minute {
			t.Errorf("slept %t until %s, want false until the context's end, 1m0s", slept, time.Since(began))
		}
	})
}
