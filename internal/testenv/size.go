package testenv

import (
	"hash/fnv"
	"os"
	"slices"
	"strconv"
	"testing"
)

const (
	// EnvAll makes every test run in full.
	EnvAll = "WALPOST_TEST_ALL"
	// EnvTurn is a number, such as that of the day, which chooses the heavy tests that run in full: each has
	// its turn within a week.
	EnvTurn = "WALPOST_TEST_TURN"
	turns   = 7
)

// Full reports whether a heavy test runs with all of its data, and in all of its combinations. Each asserts
// the same with less.
func Full(tb testing.TB) bool {
	tb.Helper()
	return full(tb.Name(), os.Getenv(EnvAll), os.Getenv(EnvTurn))
}

func full(name, all, turn string) bool {
	if all != "" {
		return true
	}
	n, err := strconv.ParseUint(turn, 10, 64)
	if err != nil {
		return false
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	return uint64(h.Sum32()%turns) == n%turns
}

// Size is how many rows, rounds or bytes a heavy test takes.
func Size(tb testing.TB, small, all int) int {
	tb.Helper()
	if Full(tb) {
		return all
	}
	return small
}

// FullOnly skips a test that has no smaller size: a whole rig.
func FullOnly(tb testing.TB) {
	tb.Helper()
	if !Full(tb) {
		tb.Skipf("runs by turns: %s=1 runs all", EnvAll)
	}
}

// Some returns n of the cases of a matrix, or all of them in full. The test's name and the turn choose, so
// that between tests, and from day to day, each case is met.
func Some[T any](tb testing.TB, n int, all ...T) []T {
	tb.Helper()
	if Full(tb) || n >= len(all) {
		return all
	}
	turn, _ := strconv.ParseUint(os.Getenv(EnvTurn), 10, 64) // zero where it is not set
	return some(tb.Name(), turn, n, all)
}

func some[T any](name string, turn uint64, n int, all []T) []T {
	h := fnv.New32a()
	_, _ = h.Write([]byte(name))
	first := int((uint64(h.Sum32()) + turn) % uint64(len(all)))
	at := make([]int, n)
	for i := range at { // as far from each other as can be
		at[i] = (first + i*len(all)/n) % len(all)
	}
	slices.Sort(at)
	chosen := make([]T, n)
	for i := range at {
		chosen[i] = all[at[i]]
	}
	return chosen
}
