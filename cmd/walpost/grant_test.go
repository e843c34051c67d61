package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/walpost/walpost/migrations"
)

// TestGrantsAreThoseOfTheScript: `migrate up --grant` gives what deploy/grants.sql gives, for each mark.
func TestGrantsAreThoseOfTheScript(t *testing.T) {
	script, err := os.ReadFile("../../deploy/grants.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, mark := range []string{"update", "delete", "journal"} {
		cfg := defaultConfig()
		cfg.Outboxes[0].Mark = MarkConfig{Name: mark}
		tables, err := cfg.Tables()
		if err != nil {
			t.Fatal(err)
		}
		var sequences []string
		if mark == "journal" {
			sequences = []string{":ids"}
		}
		got := grants(tables, sequences, "public", "walpost")
		for i, s := range got {
			got[i] = strings.NewReplacer(`"public".`, "", `"`, "").Replace(s)
		}
		if want := granted(string(script), mark); len(want) < 2 || !slices.Equal(got, want) {
			t.Errorf("mark %s: the program grants\n%q, the script\n%q", mark, got, want)
		}
	}
}

// TestGroupGrantsAreThoseOfTheScript: so does `migrate up --only GROUP --grant` for an application's role.
func TestGroupGrantsAreThoseOfTheScript(t *testing.T) {
	script, err := os.ReadFile("../../deploy/grants.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range []migrations.Group{migrations.Consumer, migrations.Idempotency} {
		var want []string
		for line := range strings.Lines(string(script)) {
			if line, found := strings.CutSuffix(strings.TrimSpace(line), ` TO :"`+string(g)+`";`); found {
				want = append(want, line+` TO "app"`)
			}
		}
		got := groupGrants([]migrations.Group{g}, "public", "app")
		for i, s := range got {
			got[i] = strings.ReplaceAll(s, `"public".`, "")
		}
		if len(want) == 0 || !slices.Equal(got, want) {
			t.Errorf("group %s: the program grants\n%q, the script\n%q", g, got, want)
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
