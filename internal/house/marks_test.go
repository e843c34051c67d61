package house

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// markPlace chooses the implementation of a mark, and is the only file of its package that tells marks apart.
const markPlace = "internal/table/mark.go"

// markless are the packages that ask [table.Mark] what a mark does. The list only grows.
var markless = []string{
	"fallback", "internal/deadletter", "internal/retention", "internal/table", "relay", "verify",
}

// TestMarksAreToldApartInOnePlace: a new mark is an implementation, and not one more branch in every statement.
func TestMarksAreToldApartInOnePlace(t *testing.T) {
	names := regexp.MustCompile(`\boutbox\.Mark(?:Update|Delete|None)\b`)
	for _, room := range markless {
		files := sources(t, filepath.Join(root, room))
		if len(files) == 0 {
			t.Errorf("%s has no Go files", room)
		}
		for _, file := range files {
			if file == filepath.Join(root, markPlace) {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if found := names.Find(text); found != nil {
				t.Errorf("%s names %s: ask internal/table.MarkOf", file, found)
			}
		}
	}
	text, err := os.ReadFile(filepath.Join(root, markPlace))
	if err != nil {
		t.Fatal(err)
	}
	if !names.Match(text) {
		t.Error(markPlace + " names no mark: the test looks for other names than the code has")
	}
}
