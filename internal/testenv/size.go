package testenv

import (
	"hash/fnv"
	"os"
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
