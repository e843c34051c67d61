package verify

import (
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
)

func TestIDs(t *testing.T) {
	s := newIDs()
	all := []string{"0", "1", "65536", "-1", "1099511627775", "1099511627776", "9223372036854775807", "0190a4e6-4b1f-7c3c-9a58-b4a2c1a7d001", "order-1", ""}
	for _, id := range all {
		if s.has(id) {
			t.Errorf("%q is there before it was added", id)
		}
		if !s.add(id) {
			t.Errorf("%q was there before", id)
		}
		if s.add(id) || !s.has(id) {
			t.Errorf("%q is not there after it was added", id)
		}
	}
	if s.has("2") || s.has("order-2") {
		t.Error("others are there, too")
	}
}

// TestIDsAreCompressed: a hundred bytes for an id would be too much to compare large
// tables.
func TestIDsAreCompressed(t *testing.T) {
	s := newIDs()
	const n = 1_000_000
	for i := range n {
		s.add(strconv.Itoa(3 * i))
	}
	if size := s.numbers.GetSizeInBytes(); size > n || len(s.others) > 0 {
		t.Errorf("%d ids of a sequence take %d bytes, and %d are kept one by one", n, size, len(s.others))
	}
}

func BenchmarkIDs(b *testing.B) {
	for name, id := range map[string]func(int) string{
		"sequence": strconv.Itoa,
		"uuid":     func(int) string { return fmt.Sprintf("%016x-%016x", rand.Uint64(), rand.Uint64()) },
	} {
		b.Run(name, func(b *testing.B) {
			s := newIDs()
			for i := range b.N {
				s.add(id(i))
			}
		})
	}
}
