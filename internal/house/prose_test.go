package house

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestAPhraseIsFoundAcrossLines(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	source, err := GoPassages(write("a.go", `package a

// The slot is made
// anew.
const text = "made\tAnew, not unmade anew"

func slotMadeAnew(made, anew int) { x := "made" }
`))
	if err != nil {
		t.Fatal(err)
	}
	document, err := MarkdownPassages(write("a.md", "# made\nanew\n\n- made\n  anew\n- anew\n\n```\nmade anew\n```\n"))
	if err != nil {
		t.Fatal(err)
	}
	type place struct {
		kind Kind
		line int
	}
	var got []place
	for _, p := range Find([]Word{{Not: "made anew"}}, append(source, document...))[0] {
		got = append(got, place{p.Kind, p.Line})
	}
	if want := []place{{Comment, 3}, {Text, 5}, {Name, 7}, {Document, 4}, {Code, 9}}; !slices.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
}
