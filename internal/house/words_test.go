package house

import (
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
)

func TestForbiddenWordsAreNotUsed(t *testing.T) {
	passages := everyPassage(t)
	for i, found := range Find(Words, passages) {
		for _, p := range found {
			t.Errorf("%s:%d: a %s says %q; say %s", p.File, p.Line, p.Kind, Words[i].Not, Words[i].Say)
		}
	}
}

// everyPassage leaves out this package, which has to name the words.
func everyPassage(t *testing.T) (all []Passage) {
	t.Helper()
	add := func(passages []Passage, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, passages...)
	}
	if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		hidden := strings.HasPrefix(d.Name(), ".") && path != root
		if d.IsDir() && (hidden || path == filepath.Join(root, "internal", "house")) {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".go") {
			add(GoPassages(path))
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	documents, err := Documents(root)
	if err != nil {
		t.Fatal(err)
	}
	manuals, err := filepath.Glob(filepath.Join(root, "cmd/walpost/help/*.txt"))
	if err != nil || len(manuals) == 0 {
		t.Fatalf("no manuals of commands: %v", err)
	}
	for _, document := range append(documents, manuals...) {
		add(MarkdownPassages(document))
	}
	if len(all) < 10_000 {
		t.Errorf("found only %d passages", len(all))
	}
	return all
}
