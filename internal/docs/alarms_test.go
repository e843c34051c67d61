package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/walpost/walpost/internal/alarm"
)

const (
	alarmsFile = "docs/ALARMS.md"
	runbooks   = "internal/alarm/runbook"
	helmRules  = "deploy/helm/walpost/rules.yaml"
)

var (
	alertHeading = regexp.MustCompile(`(?m)^### (\w+)$`)
	critical     = regexp.MustCompile(`match "\^\((.*)\)\$" \$labels\.alarm`)
)

func headings(heading *regexp.Regexp, text string) (names []string) {
	for _, m := range heading.FindAllStringSubmatch(text, -1) {
		names = append(names, m[1])
	}
	return names
}

// TestAlarmsPage: the page has the table of the alarms and their runbooks, and the rule WalpostAlarm has their severities.
func TestAlarmsPage(t *testing.T) {
	index := "| Alarm | Severity | In one line |\n| --- | --- | --- |\n"
	var sections, severe, files []string
	for _, a := range alarm.All() {
		index += fmt.Sprintf("| [`%[1]s`](#%[1]s) | %s | %s |\n", a.Name(), a.Severity(), escaped(a.Meaning()))
		files = append(files, a.Name()+".md")
		sections = append(sections, fmt.Sprintf("### `%s`\n\n%s", a.Name(), read(t, runbooks+"/"+a.Name()+".md")))
		if a.Severity() == alarm.Critical {
			severe = append(severe, a.Name())
		}
	}
	written, err := filepath.Glob(filepath.Join(root, runbooks, "*"))
	if err != nil {
		t.Fatal(err)
	}
	for i, file := range written {
		written[i] = filepath.Base(file)
	}
	same(t, runbooks, written, files)

	before, rest, began := strings.Cut(read(t, alarmsFile), "| Alarm |")
	_, after, ended := strings.Cut(rest, "\n## Alerts\n")
	if !began || !ended {
		t.Fatalf("%s has no index, or no alerts behind the alarms", alarmsFile)
	}
	generated(t, alarmsFile, before+index+"\n## Alarms\n\n"+strings.Join(sections, "\n")+"\n## Alerts\n"+after)
	rule := `match "^(` + strings.Join(severe, "|") + `)$$" $$labels.alarm`
	for _, file := range []string{rulesFile, helmRules} {
		generated(t, file, critical.ReplaceAllString(read(t, file), rule))
	}
}

// generated compares a file with what the program has, or writes it with -update.
func generated(t *testing.T, file, want string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(filepath.Join(root, file), []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if read(t, file) != want {
		t.Errorf("%s does not have what the program has: run go test ./internal/docs -run %s -update", file, t.Name())
	}
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
