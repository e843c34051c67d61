package main

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// TestGrantsAreThoseOfTheScript: `migrate up --grant` gives what deploy/grants.sql gives, for each mark.
func TestGrantsAreThoseOfTheScript(t *testing.T) {
	script, err := os.ReadFile("../../deploy/grants.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, mark := range []string{"update", "delete", "none"} {
		cfg := defaultConfig()
		cfg.Outboxes[0].Mark = mark
		tables, err := cfg.Tables()
		if err != nil {
			t.Fatal(err)
		}
		got := grants(tables, "public", "walpost")
		for i, s := range got {
			got[i] = strings.NewReplacer(`"public".`, "", `"`, "").Replace(s)
		}
		if want := granted(string(script), mark); len(want) < 2 || !slices.Equal(got, want) {
			t.Errorf("mark %s: the program grants\n%q, the script\n%q", mark, got, want)
		}
	}
}

// granted are the relay's grants of the script, those in a branch of another mark left out.
func granted(script, mark string) (all []string) {
	in := mark
	for line := range strings.Lines(script) {
		line = strings.TrimSpace(line)
		_, branch, found := strings.Cut(line, "if :mark_")
		switch {
		case found:
			in = branch
		case line == `\endif`:
			in = mark
		case in == mark && strings.HasSuffix(line, `TO :"relay";`):
			all = append(all, strings.NewReplacer(`:"relay";`, "walpost", ":outbox", "outbox_messages").Replace(line))
		}
	}
	return all
}
