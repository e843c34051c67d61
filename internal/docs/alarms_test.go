package docs

import (
	"regexp"
	"slices"
	"strings"
	"testing"
)

const alarmsFile = "docs/ALARMS.md"

var (
	alarmHeading = regexp.MustCompile("(?m)^### `(\\w+)`$")
	alertHeading = regexp.MustCompile(`(?m)^### (\w+)$`)
	alarmLink    = regexp.MustCompile("^\\[`(\\w+)`\\]\\(#(\\w+)\\)$")
)

func headings(heading *regexp.Regexp, text string) (names []string) {
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		names = append(names, m[1])
	}
	return names
}

// TestEveryAlarmHasAHeading, and none for one that is never raised.
func TestEveryAlarmHasAHeading(t *testing.T) {
	same(t, alarmsFile, headings(alarmHeading, section(t, alarmsFile, "## Alarms")), raisedAlarms(t))
}

// TestEveryAlertHasAHeading, and none for one that no rule raises.
func TestEveryAlertHasAHeading(t *testing.T) {
	var alerts []string
	for _, r := range rules(t) {
		if r.has("alert") {
			alerts = append(alerts, r.at("alert").text())
		}
	}
	same(t, alarmsFile, headings(alertHeading, section(t, alarmsFile, "## Alerts")), alerts)
}

// TestEveryAlarmSaysWhatToDo: each entry has the four parts that an operator asks for, in one order.
func TestEveryAlarmSaysWhatToDo(t *testing.T) {
	parts := []string{"What happened", "For events", "Do", "Ends"}
	part := regexp.MustCompile(`(?m)^- \*\*([\w ]+):\*\* \S`)
	for _, group := range []string{"## Alarms", "## Alerts"} {
		for _, entry := range strings.Split(section(t, alarmsFile, group), "\n### ")[1:] {
			name, text, _ := strings.Cut(entry, "\n")
			if got := headings(part, text); !slices.Equal(got, parts) {
				t.Errorf("%s: %s has the parts %q, want %q", alarmsFile, name, got, parts)
			}
		}
	}
}

// TestIndexListsTheAlarms with the severity that the rule WalpostAlarm gives them.
func TestIndexListsTheAlarms(t *testing.T) {
	critical := severities(t)
	var listed []string
	for line := range strings.Lines(section(t, alarmsFile, "## Index")) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		m := alarmLink.FindStringSubmatch(strings.TrimSpace(cells[0]))
		if m == nil {
			continue
		}
		if listed = append(listed, m[1]); m[1] != m[2] {
			t.Errorf("%s: %s links to %s", alarmsFile, m[1], m[2])
		}
		want := "warning"
		if slices.Contains(critical, m[1]) {
			want = "critical"
		}
		if got := strings.TrimSpace(cells[1]); got != want {
			t.Errorf("%s says that %s is %s, the rule says %s", alarmsFile, m[1], got, want)
		}
	}
	same(t, alarmsFile, listed, raisedAlarms(t))
	if !slices.IsSorted(listed) {
		t.Errorf("%s: the index is not in alphabetical order", alarmsFile)
	}
}

// raisedAlarms are those that the code can raise.
func raisedAlarms(t *testing.T) []string {
	t.Helper()
	all := append(arguments(t, "relay", 0, "alarm"), arguments(t, "fallback", 0, "Alarm")...)
	slices.Sort(all)
	return slices.Compact(all)
}

// severities are the alarms that the rule WalpostAlarm calls critical.
func severities(t *testing.T) []string {
	t.Helper()
	for _, r := range rules(t) {
		if r.has("alert") && r.at("alert").text() == "WalpostAlarm" {
			if m := severe.FindStringSubmatch(r.at("labels", "severity").text()); m != nil {
				return strings.Split(m[1], "|")
			}
		}
	}
	t.Fatal("WalpostAlarm does not say which alarms are critical")
	return nil
}
