package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/walpost/walpost/internal/hint"
)

// newManCommand is hidden: packages are made with it.
func newManCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use: "man DIR", Short: "Write the manual pages of all commands", Hidden: true,
		Long: "Writes a manual page for each command to a directory, which it creates.",
		Args: oneArg("directory", "name one: walpost man man1"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return hint.Errorf("name another directory", "write manual pages: %w", err)
			}
			return writeManuals(cmd.Root(), args[0])
		},
	}
	ignoreConfigFlag(cmd)
	return cmd
}

// writeManuals writes the page of a command and of all below it.
func writeManuals(cmd *cobra.Command, dir string) error {
	file := filepath.Join(dir, manualName(cmd)+".1")
	if err := os.WriteFile(file, []byte(manual(cmd)), 0o644); err != nil {
		return fmt.Errorf("write manual pages: %w", err)
	}
	for _, sub := range documented(cmd) {
		if err := writeManuals(sub, dir); err != nil {
			return err
		}
	}
	return nil
}

// documented are the subcommands that `walpost --help` shows.
func documented(cmd *cobra.Command) (all []*cobra.Command) {
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() && c.Name() != "help" {
			all = append(all, c)
		}
	}
	return all
}

func manualName(cmd *cobra.Command) string {
	return strings.ReplaceAll(cmd.CommandPath(), " ", "-")
}

// manual is a page in roff's man format: the text of --help, as a terminal shows it.
func manual(cmd *cobra.Command) string {
	b := buildVersion()
	date := ""
	if b.CommitTime != nil {
		date = (*b.CommitTime)[:len("2006-01-02")]
	}
	var page strings.Builder
	name := strings.ToUpper(manualName(cmd))
	fmt.Fprintf(&page, ".TH %q 1 %q %q \"walpost\"\n", name, date, "walpost "+b.Version)
	fmt.Fprintf(&page, ".SH NAME\n%s \\- %s\n", roff(manualName(cmd)), roff(cmd.Short))
	preformatted(&page, "SYNOPSIS", cmd.UseLine())
	long := cmd.Long
	if long == "" {
		long = cmd.Short + "."
	}
	preformatted(&page, "DESCRIPTION", long)
	preformatted(&page, "OPTIONS", strings.TrimRight(cmd.NonInheritedFlags().FlagUsages(), "\n"))
	var also []string
	if cmd.HasParent() {
		also = append(also, manualName(cmd.Parent())+"(1)")
	}
	for _, sub := range documented(cmd) {
		also = append(also, manualName(sub)+"(1)")
	}
	if len(also) > 0 {
		fmt.Fprintf(&page, ".SH SEE ALSO\n%s\n", roff(strings.Join(also, ", ")))
	}
	return page.String()
}

// preformatted is a section whose lines stay as they are.
func preformatted(page *strings.Builder, title, text string) {
	if text == "" {
		return
	}
	fmt.Fprintf(page, ".SH %s\n.nf\n", title)
	for line := range strings.Lines(text) {
		line = roff(strings.TrimSuffix(line, "\n"))
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			line = `\&` + line
		}
		page.WriteString(line + "\n")
	}
	page.WriteString(".fi\n")
}

// roff escapes what a formatter would change.
func roff(text string) string {
	escape := strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`)
	return escape.Replace(text)
}
