package main

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/setup"
)

// printScript writes the plan for psql, with the SQL of the migrations.
func printScript(w io.Writer, c *initConfig, steps []*setup.Step, nats string) error {
	fmt.Fprintln(w, "-- For psql, in the application's database. "+
		"Nothing was changed, and no file was written: walpost init does both.")
	fmt.Fprint(w, "\n"+pg.ScriptHead)
	for _, step := range steps {
		if step.Done {
			fmt.Fprintf(w, "\n-- %s\n-- It is there already.\n", step.Why)
			continue
		}
		fmt.Fprintf(w, "\n-- %s\n", cmp.Or(step.ScriptWhy, step.Why))
		fmt.Fprint(w, script(step))
	}
	fmt.Fprintf(w, "\n-- %s\n\n-- Write this into %s:\n%s", nats, c.path, indented(c.yaml()))
	_, err := fmt.Fprintf(w, "\n-- Then: %s\n-- And:  %s\n", c.command("doctor"), c.start())
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
