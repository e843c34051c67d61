package main

import (
	"fmt"
	"math"
	"sync"
	"time"
)

// growth is how much wider each bucket of a latency is than the one before: what
// a percentile is exact to.
const growth = 1.01

// latency counts durations. Its percentiles are over all of them, from the first
// on, and exact to one percent.
type latency struct {
	mu      sync.Mutex // guards what follows
	buckets [2400]int  // by the logarithm; the last one begins at six hours
	n       int
	max     time.Duration
}

func (l *latency) observe(d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.buckets[bucketOf(d)]++
	l.n++
	l.max = max(l.max, d)
}

func bucketOf(d time.Duration) int {
	us := float64(d) / float64(time.Microsecond)
	if us <= 1 {
		return 0
	}
	return min(int(math.Log(us)/math.Log(growth)), len(latency{}.buckets)-1)
}

// percentiles of the times so far; zero where there is no time yet.
type percentiles struct{ p50, p99, max time.Duration }

func (l *latency) percentiles() percentiles {
	l.mu.Lock()
	defer l.mu.Unlock()
	return percentiles{l.quantile(0.50), l.quantile(0.99), l.max}
}

func (l *latency) quantile(q float64) time.Duration {
	if l.n == 0 {
		return 0
	}
	rank := int(math.Ceil(q * float64(l.n)))
	for i, count := range &l.buckets {
		if rank -= count; rank <= 0 {
			middle := math.Pow(growth, float64(i)+0.5)
			return min(time.Duration(middle*float64(time.Microsecond)), l.max)
		}
	}
	return l.max
}

// milliseconds is a duration as the last line has it, "0.41ms".
func milliseconds(d time.Duration) string {
	return fmt.Sprintf("%.2fms", float64(d)/float64(time.Millisecond))
}
