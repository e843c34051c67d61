package alarm

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// TestTable: an entry says what has happened, and the relay raises it.
func TestTable(t *testing.T) {
	text, err := os.ReadFile("table.go")
	if err != nil {
		t.Fatal(err)
	}
	variables := regexp.MustCompile(`(?m)^\t(\w+)\s+= entry\("(\w+)"`).FindAllStringSubmatch(string(text), -1)
	if len(variables) < 30 || len(variables) != len(entries) {
		t.Fatalf("found %d variables for %d alarms", len(variables), len(entries))
	}
	const call, variable = `\.(?i:%s)\([^\n]*?`, `\balarm\.([A-Z]\w*)`
	// sayWhy in relay raises the alarm of a failure that has the slot recreated.
	const row = `recreateSlot\)(?:\.\s*\w+\([^)]*\))*\.\s*alarms\(`
	raised := names(t, "(?:"+fmt.Sprintf(call, "alarm")+"|"+row+")"+variable)
	ended := names(t, fmt.Sprintf(call, "over|ended")+variable)
	for i, v := range variables {
		a := entries[i]
		if a.name != v[2] || Find(a.name) != a {
			t.Errorf("%s is %s, and another alarm has its name", v[1], a.name)
		}
		if a.severity != Critical && a.severity != Warning || a.meaning == "" {
			t.Errorf("%s has the severity %q and the meaning %q", a.name, a.severity, a.meaning)
		}
		if !raised[v[1]] {
			t.Errorf("%s is never raised", a.name)
		}
		if ended[v[1]] != (a.over != "") {
			t.Errorf("%s has the line %q for its end; the relay logs it: %v", a.name, a.over, ended[v[1]])
		}
	}
}

// names are the variables that a pattern finds in the relay and the poller.
func names(t *testing.T, pattern string) map[string]bool {
	t.Helper()
	call := regexp.MustCompile(pattern)
	found := map[string]bool{}
	for _, dir := range []string{"relay", "fallback"} {
		files, err := filepath.Glob(filepath.Join("../..", dir, "*.go"))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: found no Go files (%v)", dir, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, m := range call.FindAllSubmatch(text, -1) {
				found[string(m[1])] = true
			}
		}
	}
	return found
}
