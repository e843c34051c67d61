package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
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

// TestUsageErrors calls each command with arguments that its usage line does not have, and without those that it needs.
// No server answers: a mistake in the command line is found first.
func TestUsageErrors(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv("WALPOST_POSTGRES_URL", "postgres://127.0.0.1:1/none")
	t.Setenv("WALPOST_NATS_URL", "nats://127.0.0.1:1")
	optional := regexp.MustCompile(`\[[^]]*\]`) // in a usage line
	calls := 0
	for _, cmd := range allCommands(newRootCommand()) {
		path := strings.Fields(cmd.CommandPath())[1:]
		_, arguments, _ := strings.Cut(cmd.Use, " ")
		if !strings.Contains(arguments, "...") || cmd.Name() == "help" {
			calls++
			refused(t, append(slices.Clone(path), "no-such", "no-such"))
		}
		if optional.ReplaceAllString(arguments, "") != "" {
			calls++
			refused(t, path)
		}
	}
	if calls < 50 {
		t.Errorf("only %d calls were made", calls)
	}
}

func refused(t *testing.T, args []string) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	code := execute(t.Context(), args, &stdout, &stderr)
	if code != 2 || !strings.HasPrefix(stderr.String(), "error: ") || !strings.Contains(stderr.String(), "\nhint: ") || stdout.Len() > 0 {
		t.Errorf("walpost %s: exit code %d, want 2 and a hint: %s%s", strings.Join(args, " "), code, &stdout, &stderr)
	}
}

// TestEveryCommandTakesConfig: scripts give each command the same --config.
func TestEveryCommandTakesConfig(t *testing.T) {
	for _, cmd := range allCommands(newRootCommand()) {
		isCobras := strings.HasPrefix(cmd.CommandPath(), "walpost completion") || cmd.Name() == "help"
		if !cmd.HasSubCommands() && !isCobras && cmd.Flags().Lookup("config") == nil {
			t.Errorf("%s does not take --config", cmd.CommandPath())
		}
	}
	var out bytes.Buffer
	if code := execute(t.Context(), []string{"version", "--config", "no-such.yaml"}, &out, &out); code != 0 {
		t.Error(&out)
	}
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
