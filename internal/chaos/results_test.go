package main

import (
	"fmt"
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
	runs, _, err := readResults("../../docs/chaos.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	faults, events, clean, lost := 0, 0.0, 0, 0
	for _, r := range runs {
		if r.ok() {
			clean++
		}
		events += float64(r.Events)
		lost += r.Lost
		for _, n := range r.Faults {
			faults += n
		}
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	total := fmt.Sprintf("%d runs, %d,%03d faults, %.1f million events. %d runs: 0 lost, 0 duplicated, 0 reordered. %d runs failed",
		len(runs), faults/1000, faults%1000, events/1e6, clean, len(runs)-clean)
	for _, want := range []string{total, fmt.Sprintf("%d,%03d rows", lost/1000, lost%1000)} {
		if !strings.Contains(string(readme), want) {
			t.Errorf("README.md does not say %q", want)
		}
	}
}

// TestEveryFailureIsExplained: a run that failed stays among the results, with its
// cause, and its seed was run again when that was mended.
func TestEveryFailureIsExplained(t *testing.T) {
	runs, cases, err := readResults("../../docs/chaos.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range possibles {
		runs = append(runs, cases[c.name]...)
	}
	failed := map[uint64]bool{}
	for _, r := range runs {
		if r.ok() {
			delete(failed, r.Seed)
			continue
		}
		failed[r.Seed] = true
		if r.Cause == "" {
			t.Errorf("seed %d failed, and nothing says why: %s", r.Seed, r.why())
		}
	}
	for seed := range failed {
		t.Errorf("seed %d was not run again", seed)
	}
}
