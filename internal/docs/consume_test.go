package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strings"
	"testing"

	"github.com/walpost/walpost/consume"
)

// TestConsumeOptions: the table names every field of consume.Config.
func TestConsumeOptions(t *testing.T) {
	testOptions(t, "docs/CONSUME.md", "consume/config.go", "Config")
}

// TestConsumeEvent: the table names every field of consume.Event.
func TestConsumeEvent(t *testing.T) {
	const file = "docs/CONSUME.md"
	var documented, coded []string
	word := regexp.MustCompile("`(\\w+)`")
	for line := range strings.Lines(section(t, file, "## The event")) {
		if first, _, table := strings.Cut(strings.TrimPrefix(line, "|"), "|"); table && strings.HasPrefix(first, " `") {
			for _, m := range word.FindAllStringSubmatch(first, -1) {
				documented = append(documented, m[1])
			}
		}
	}
	for i := range reflect.TypeFor[consume.Event]().NumField() {
		coded = append(coded, reflect.TypeFor[consume.Event]().Field(i).Name)
	}
	same(t, file, documented, coded)
}

// TestSamplesCompile: a program in a document compiles as it is.
func TestSamplesCompile(t *testing.T) {
	program := regexp.MustCompile("(?ms)^```go\n(package main\n.*?)^```")
	seen := 0
	for _, file := range documents {
		for _, m := range program.FindAllStringSubmatch(read(t, file), -1) {
			seen++
			name := filepath.Join(t.TempDir(), "main.go")
			if err := os.WriteFile(name, []byte(m[1]), 0o600); err != nil {
				t.Fatal(err)
			}
			cmd := exec.Command("go", "vet", name)
			cmd.Dir = root
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("a program in %s: %v\n%s", file, err, out)
			}
		}
	}
	if seen == 0 {
		t.Error("found no program in the documents")
	}
}

// TestConsumeMetrics: the table names every metric of package consume.
func TestConsumeMetrics(t *testing.T) {
	const file = "docs/CONSUME.md"
	source, err := os.ReadFile(filepath.Join(root, "consume/metrics.go"))
	if err != nil {
		t.Fatal(err)
	}
	coded := regexp.MustCompile(`consumer_[a-z_]+`).FindAllString(string(source), -1)
	var documented []string
	for _, row := range rows(section(t, file, "## Metrics")) {
		documented = append(documented, row[0])
	}
	same(t, file, documented, coded)
}
