package fallback

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestIDSet: it has each id that was added, and no other one while its ranges are few.
func TestIDSet(t *testing.T) {
	for range 200 {
		s, had := idSet{{math.MinInt64, 100}}, map[int64]bool{}
		near, step := rand.Int64N(100), 1+rand.Int64N(3)
		for at := int64(90); at < 3000; at += step {
			id := at + rand.Int64N(near+1)
			if got, want := s.add(id), had[id] || id <= 100; got != want {
				t.Fatalf("%d: %v, want %v: %v", id, got, want, s)
			}
			had[id] = true
		}
		for i := range s {
			if s[i].first > s[i].last || i > 0 && s[i-1].last+1 >= s[i].first {
				t.Fatalf("range %d of %v", i, s)
			}
		}
	}
	s := idSet{{math.MinInt64, 0}}
	for id := int64(2); id < 10*mostRanges; id += 2 {
		if s.add(id) {
			t.Fatalf("%d: had", id)
		}
		if len(s) > mostRanges+1 {
			t.Fatalf("%d ranges", len(s))
		}
	}
	for id := int64(2); id < 10*mostRanges; id += 2 {
		if !s.add(id) {
			t.Fatalf("%d: not had", id)
		}
	}
	for _, id := range []int64{math.MaxInt64, math.MaxInt64 - 1, math.MinInt64, math.MaxInt64} {
		s.add(id)
		if !s.add(id) {
			t.Fatalf("%d: not had", id)
		}
	}
}
