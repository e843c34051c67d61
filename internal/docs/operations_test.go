package docs

import (
	"regexp"
	"testing"
)

var alarmHeading = regexp.MustCompile("(?m)^### `(\\w+)`$")

// TestOperationsHasAHeadingForEveryAlarm, and none for one that is never raised.
func TestOperationsHasAHeadingForEveryAlarm(t *testing.T) {
	const file = "docs/OPERATIONS.md"
	var documented []string
	for _, m := range alarmHeading.FindAllStringSubmatch(section(t, file, "## Alarms"), -1) {
		documented = append(documented, m[1])
	}
	same(t, file, documented, arguments(t, "relay", 0, "alarm"))
}

// TestOperationsTellsWhatIsWrongWithAStream compares the codes of the findings
// that a start reports, and whether they are refused.
func TestOperationsTellsWhatIsWrongWithAStream(t *testing.T) {
	const file = "docs/OPERATIONS.md"
	documented := map[string][]string{}
	for _, row := range rows(section(t, file, "### What is checked")) {
		documented[row[1]] = append(documented[row[1]], row[0])
	}
	for verdict, function := range map[string]string{"refused": "refuse", "refused unless accepted": "weak", "warned of": "warn"} {
		same(t, file+" ("+verdict+")", documented[verdict], arguments(t, "publish", 1, function))
		delete(documented, verdict)
	}
	for verdict, codes := range documented {
		t.Errorf("%s says %q of %q, which is no verdict", file, verdict, codes)
	}
}

// TestOperationsTellsWhyRowsAreParked compares the classes of a row's own
// failures.
func TestOperationsTellsWhyRowsAreParked(t *testing.T) {
	const file = "docs/OPERATIONS.md"
	constant := regexp.MustCompile(`(?m)^\s+Row[A-Z]\w+ += "(\w+)"`)
	var coded, documented []string
	for _, m := range constant.FindAllStringSubmatch(read(t, "publish/errors.go"), -1) {
		coded = append(coded, m[1])
	}
	for _, row := range rows(section(t, file, "## Rows that cannot be sent")) {
		documented = append(documented, row[0])
	}
	same(t, file, documented, coded)
}
