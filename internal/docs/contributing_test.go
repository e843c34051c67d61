package docs

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	codeSpan   = regexp.MustCompile("`([^`\n]+)`")
	codeIndent = regexp.MustCompile(`(?m)^    (\S.*)$`)
)

// TestContributingTellsTheLogLines: the lines and the steps of a session are texts of the program.
func TestContributingTellsTheLogLines(t *testing.T) {
	const file = "CONTRIBUTING.md"
	text := section(t, file, "## Debug a session")
	var lines []string
	for _, row := range strings.Split(text, "\n") {
		if cell, _, found := strings.Cut(strings.TrimPrefix(row, "| "), " |"); found && strings.HasPrefix(row, "| `") {
			lines = append(lines, headings(codeSpan, cell)...)
		}
	}
	steps := headings(codeIndent, text)
	if len(lines) < 10 || len(steps) < 5 {
		t.Fatalf("%s has %d lines and %d steps of a session", file, len(lines), len(steps))
	}
	program := source(t)
	for i, step := range steps {
		steps[i] = `"` + step + `"`
	}
	for _, line := range append(lines, steps...) {
		if !strings.Contains(program, line) {
			t.Errorf("%s has %s, which the program does not say", file, line)
		}
	}
}

// source is all of the code, tests left out.
func source(t *testing.T) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && path != root && strings.HasPrefix(d.Name(), ".") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		b, err := os.ReadFile(path)
		all.Write(b)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

var namedFile = regexp.MustCompile("`((?:[a-z0-9_.-]+/)+(?:[a-zA-Z0-9_.-]+\\.(?:go|md|sql|yaml|json|txtar))?)`")

// TestNamedFilesExist: a file or a directory that a document names in backquotes is there.
func TestNamedFilesExist(t *testing.T) {
	seen := 0
	for _, file := range documents {
		for _, name := range headings(namedFile, read(t, file)) {
			seen++
			if _, err := os.Stat(filepath.Join(root, name)); err != nil {
				t.Errorf("%s names %s: %v", file, name, err)
			}
		}
	}
	if seen < 20 {
		t.Errorf("the documents name only %d files", seen)
	}
}

// TestReadmeListsTheCommands: every command of the program has its row.
func TestReadmeListsTheCommands(t *testing.T) {
	_, list, _ := strings.Cut(walpost(t, "--help"), "Available Commands:\n")
	list, _, _ = strings.Cut(list, "\n\n")
	var coded, documented []string
	for line := range strings.Lines(list) {
		if name := strings.Fields(line)[0]; name != "help" {
			coded = append(coded, name)
		}
	}
	for _, row := range rows(section(t, "README.md", "## Commands")) {
		documented = append(documented, strings.Fields(strings.ReplaceAll(row[0], "`", ""))[1])
	}
	for i, name := range documented {
		documented[i] = strings.TrimSuffix(name, ",")
	}
	same(t, "README.md", documented, coded)
}
