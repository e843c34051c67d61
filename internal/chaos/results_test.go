package main

import (
	"os"
	"strings"
	"testing"
)

// TestTheTablesAddUpTheRuns: docs/CHAOS.md ends with what -summary prints of the
// runs that are kept beside it.
func TestTheTablesAddUpTheRuns(t *testing.T) {
	var want strings.Builder
	if err := printSummary(&want, "../../docs/chaos.jsonl"); err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/CHAOS.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(page), "\n"+want.String()) {
		t.Error("docs/CHAOS.md does not end with what `go run ./internal/chaos -summary -results docs/chaos.jsonl` prints")
	}
}

// TestEveryRunIsClean: what failed on the way was mended, and its seed was run again.
func TestEveryRunIsClean(t *testing.T) {
	runs, cases, err := readResults("../../docs/chaos.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range possibles {
		runs = append(runs, cases[c.name]...)
	}
	seeds := map[uint64]bool{}
	for _, r := range runs {
		if !r.ok() {
			t.Errorf("seed %d failed: %s", r.Seed, r.why())
		}
		if seeds[r.Seed] {
			t.Errorf("seed %d is counted twice", r.Seed)
		}
		seeds[r.Seed] = true
	}
}
