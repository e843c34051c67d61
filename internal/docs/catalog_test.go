package docs

import (
	"regexp"
	"strings"
	"testing"
)

// TestCatalogPageTellsWhatIsWrong compares the codes and their levels.
func TestCatalogPageTellsWhatIsWrong(t *testing.T) {
	const file = "docs/CATALOG.md"
	levels := map[string]string{}
	var documented []string
	code := regexp.MustCompile("catalog-[a-z]+")
	for line := range strings.Lines(section(t, file, "## Check it in CI")) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 || !strings.HasPrefix(line, "| `") {
			continue
		}
		for _, one := range code.FindAllString(cells[1], -1) {
			documented = append(documented, one)
			levels[one] = cells[2]
		}
	}
	errors := append(arguments(t, "catalog", 1, "fault", "breach"), arguments(t, "catalog", 0, "Coded")...)
	warnings := arguments(t, "catalog", 1, "doubt")
	var coded []string
	for level, codes := range map[string][]string{"error": errors, "warning": warnings} {
		for _, one := range codes {
			if !strings.Contains(strings.Join(coded, " ")+" ", one+" ") {
				coded = append(coded, one)
			}
			if !strings.Contains(levels[one], level) {
				t.Errorf("%s says that %s is %q, the code says %q", file, one, levels[one], level)
			}
		}
	}
	same(t, file, documented, coded)
}
