package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestTheTablesShowTheResults: docs/BENCHMARKS.md ends with what -summary prints of the
// results that are kept, and the plots are theirs.
func TestTheTablesShowTheResults(t *testing.T) {
	const docs = "../../docs"
	folder := filepath.Join(t.TempDir(), "benchmarks")
	if err := os.CopyFS(folder, os.DirFS(filepath.Join(docs, "benchmarks"))); err != nil {
		t.Fatal(err)
	}
	var tables bytes.Buffer
	if err := summarize(&tables, folder); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(docs, "BENCHMARKS.md"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(text), tables.String()) {
		t.Error("write the end of docs/BENCHMARKS.md again: go run ./internal/benchmark -summary docs/benchmarks")
	}
	plots, err := filepath.Glob(filepath.Join(folder, "*.svg"))
	if err != nil || len(plots) == 0 {
		t.Fatalf("%d plots: %v", len(plots), err)
	}
	for _, plot := range plots {
		want, err := os.ReadFile(plot)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(filepath.Join(docs, "benchmarks", filepath.Base(plot))); err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s is not what -summary draws: %v", filepath.Base(plot), err)
		}
	}
}
