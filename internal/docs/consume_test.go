package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
)

// TestConsumeOptions: the table names every field of consume.Config.
func TestConsumeOptions(t *testing.T) {
	testOptions(t, "docs/CONSUME.md", "consume/config.go", "Config")
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
