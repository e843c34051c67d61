package relay_test

import (
	"fmt"
	"slices"
	"sync"
	"time"
)

// latencies are collected to be printed, never to be judged: the machine may be
// busy with something else.
type latencies struct {
	mu  sync.Mutex
	all []time.Duration
}

func (l *latencies) add(d time.Duration) {
	l.mu.Lock()
	l.all = append(l.all, d)
	l.mu.Unlock()
}

func (l *latencies) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.all) == 0 {
		return "nothing"
	}
	slices.Sort(l.all)
	at := func(share float64) time.Duration {
		return l.all[int(share*float64(len(l.all)-1))].Round(10 * time.Microsecond)
	}
	return fmt.Sprintf("p50 %s, p99 %s, max %s (%d)", at(0.5), at(0.99), at(1), len(l.all))
}
