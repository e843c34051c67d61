package docs

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

// TestOperationsTellsWhatIsWrongWithAStream compares the codes of the findings
// that a start reports, and whether they are refused.
func TestOperationsTellsWhatIsWrongWithAStream(t *testing.T) {
	const file = "docs/OPERATIONS.md"
	documented := map[string][]string{}
	for _, row := range rows(section(t, file, "### What is checked")) {
		documented[row[1]] = append(documented[row[1]], row[0])
	}
	for verdict, function := range map[string]string{"refused": "refuse", "refused unless accepted": "weak", "warned of": "warn"} {
		same(t, file+" ("+verdict+")", documented[verdict], arguments(t, "internal/jetstream", 1, function))
		delete(documented, verdict)
	}
	for verdict, codes := range documented {
		t.Errorf("%s says %q of %q, which is no verdict", file, verdict, codes)
	}
}

// TestOperationsTellsWhatDoctorFinds compares the codes and their levels.
func TestOperationsTellsWhatDoctorFinds(t *testing.T) {
	const file = "docs/OPERATIONS.md"
	var documented, coded []string
	levels := map[string]string{}
	for _, row := range rows(section(t, file, "## Doctor")) {
		documented = append(documented, row[0])
		levels[row[0]] = row[1]
	}
	found := map[string][]string{}
	for _, dir := range []string{"internal/pg", "stream", "internal/table", "internal/jetstream", "publish", "relay", "cmd/walpost"} {
		for level, all := range map[string][]string{
			"error": append(arguments(t, dir, 1, "If", "IfShared"), arguments(t, dir, 0, "Coded", "Fault")...),
			"warn":  arguments(t, dir, 0, "Warning"), "info": arguments(t, dir, 0, "Note"), "": arguments(t, dir, 1, "Failed"),
		} {
			for _, code := range all {
				if !slices.Contains(found[code], level) {
					found[code] = append(found[code], level)
				}
			}
		}
	}
	for code, with := range found {
		coded = append(coded, code)
		for _, level := range with {
			if !strings.Contains(levels[code], level) {
				t.Errorf("%s says that %s is %q, the code says %q", file, code, levels[code], level)
			}
		}
	}
	same(t, file, documented, coded)
}

// TestOperationsTellsWhyRowsAreParked compares the classes of a row's own
// failures.
func TestOperationsTellsWhyRowsAreParked(t *testing.T) {
	const file = "docs/OPERATIONS.md"
	constant := regexp.MustCompile(`(?m)^\s+Row[A-Z]\w+ += "(\w+)"`)
	var coded, documented []string
	for _, m := range constant.FindAllStringSubmatch(read(t, "outbox/rowerror.go"), -1) {
		coded = append(coded, m[1])
	}
	for _, row := range rows(section(t, file, "## Rows that cannot be sent")) {
		documented = append(documented, row[0])
	}
	same(t, file, documented, coded)
}
