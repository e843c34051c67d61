package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/walpost/walpost/internal/setup"
	"github.com/walpost/walpost/outbox"
)

// printScript writes the plan for psql, with the SQL of the migrations.
func printScript(w io.Writer, c *initConfig, steps []*setup.Step, nats string) error {
	fmt.Fprintln(w, "-- For psql, in the application's database. "+
		"walpost init does the same, and writes the files.")
	for _, step := range steps {
		fmt.Fprintf(w, "\n-- %s\n", step.Why)
		if step.Done {
			fmt.Fprintln(w, "-- It is there already.")
			continue
		}
		if step.AsOwner != "" {
			fmt.Fprintf(w, "SET ROLE %s;\n", outbox.QuoteIdent(step.AsOwner))
		}
		fmt.Fprint(w, script(step))
		if step.AsOwner != "" {
			fmt.Fprintln(w, "RESET ROLE;")
		}
	}
	_, err := fmt.Fprintf(w, "\n-- %s\n-- %s:\n%s", nats, c.path, indented(c.yaml()))
	return err
}

func script(step *setup.Step) string {
	if step.Script != "" {
		return step.Script
	}
	var b strings.Builder
	for _, sql := range step.SQL {
		b.WriteString(sql)
		if !strings.HasPrefix(sql, "--") {
			b.WriteByte(';')
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// indented is a text as a comment of SQL.
func indented(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString(strings.TrimRight("--   "+line, " \n") + "\n")
	}
	return b.String()
}
