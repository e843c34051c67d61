package main

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strconv"
	"testing"

	"github.com/walpost/walpost/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestMutantsCanBePlanted: the texts that they replace are still there. `make mutants` builds and runs them.
func TestMutantsCanBePlanted(t *testing.T) {
	for _, m := range mutants {
		if err := testenv.Plant(t.Context(), map[string]string{}, m.edits...); err != nil {
			t.Errorf("%s: %v", m.name, err)
		}
	}
}

var mutantNumber = regexp.MustCompile(`\bM(\d+)\b`)

// TestTheDocumentsNumberTheMutants: docs/CHAOS.md has a row for each, in their order, and docs/GUARANTEES.md
// names each at a guarantee, and none that does not exist.
func TestTheDocumentsNumberTheMutants(t *testing.T) {
	var all, rows []string
	for i := range mutants {
		all = append(all, strconv.Itoa(i+1))
	}
	chaos, err := os.ReadFile("../../docs/CHAOS.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile(`(?m)^\| M(\d+) \| `).FindAllSubmatch(chaos, -1) {
		rows = append(rows, string(m[1]))
	}
	if !slices.Equal(rows, all) {
		t.Errorf("docs/CHAOS.md has rows for the mutants %q, there are %q", rows, all)
	}
	guarantees, err := os.ReadFile("../../docs/GUARANTEES.md")
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	for _, m := range mutantNumber.FindAllSubmatch(guarantees, -1) {
		named[string(m[1])] = true
	}
	if got := slices.Sorted(maps.Keys(named)); !slices.Equal(got, slices.Sorted(slices.Values(all))) {
		t.Errorf("docs/GUARANTEES.md names the mutants %q, there are %q", got, all)
	}
}
