package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// allCommands are a command and all below it.
func allCommands(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, sub := range cmd.Commands() {
		all = append(all, allCommands(sub)...)
	}
	return all
}

// TestManualsHaveTheNames: each name from the code is put into the text of --help and of the manual page.
func TestManualsHaveTheNames(t *testing.T) {
	t.Chdir(t.TempDir())
	var out bytes.Buffer
	if code := execute(t.Context(), []string{"man", "man1"}, &out, &out); code != 0 {
		t.Fatal(&out)
	}
	pages, err := filepath.Glob("man1/*.1")
	if err != nil || len(pages) < 40 {
		t.Fatalf("%d manual pages: %v", len(pages), err)
	}
	texts := map[string]string{}
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		texts[page] = string(text)
	}
	for _, cmd := range allCommands(newRootCommand()) {
		var stdout bytes.Buffer
		if code := execute(t.Context(), append(strings.Fields(cmd.CommandPath())[1:], "--help"), &stdout, &stdout); code != 0 {
			t.Errorf("%s --help: exit code %d", cmd.CommandPath(), code)
		}
		texts[cmd.CommandPath()+" --help"] = stdout.String()
	}
	for name, text := range texts {
		if strings.Contains(text, "{{") {
			t.Errorf("%s has a name that was not filled in: %s", name, text)
		}
	}
}
