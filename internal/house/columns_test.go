package house

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestLinesEndWhereTheyShould reads every Go file of the checkout, tests excepted.
func TestLinesEndWhereTheyShould(t *testing.T) {
	read := 0
	err := filepath.WalkDir(root, func(file string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		switch {
		case entry.IsDir() && file != root && (strings.HasPrefix(name, ".") || name == "testdata"):
			return fs.SkipDir // what Git or a download keeps there, and files that tests read
		case entry.IsDir() || !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return err
		}
		read++
		for _, line := range LongLines(string(text)) {
			t.Errorf("%s:%d is wider than %d columns", file, line, MaxColumns)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if read < 100 {
		t.Errorf("read only %d Go files", read)
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
