package house

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// narrow are the packages whose lines, tests excepted, end at [MaxColumns]. The list only grows.
var narrow = []string{
	"bench", "cmd/walpost", "cmd/walpost-demo", "decode", "fallback", "internal/check", "internal/deadletter",
	"internal/hint", "internal/house", "internal/house/measure", "internal/pg", "internal/retention",
	"internal/secretfile", "internal/sleep", "migrations", "outbox", "publish", "relay", "stream", "verify",
}

func TestLinesEndWhereTheyShould(t *testing.T) {
	for _, room := range narrow {
		files := sources(t, filepath.Join(root, room))
		if len(files) == 0 {
			t.Errorf("%s has no Go files", room)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range LongLines(string(text)) {
				t.Errorf("%s:%d is wider than %d columns", file, line, MaxColumns)
			}
		}
	}
}

const root = "../.."

// sources are the Go files of a folder, tests excepted.
func sources(t *testing.T, folder string) []string {
	t.Helper()
	all, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all, func(name string) bool { return strings.HasSuffix(name, "_test.go") })
}
