package docs

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const configurationPage = "docs/CONFIGURATION.md"

// setting is one key as `walpost config example` tells of it: limits are what can be set, where that is no free text.
type setting struct{ key, env, value, limits, help string }

// keyGroups are the headings of the page, each with what its keys begin with.
var keyGroups = []struct {
	heading string
	keys    []string
}{
	{"## PostgreSQL", []string{"postgres."}},
	{"## Outboxes", []string{"outboxes[].", "source", "shard"}},
	{"## NATS", []string{"nats."}},
	{"## Publishing", []string{"publish.", "mode"}},
	{"## The table", []string{"fallback."}},
	{"## The event catalogue", []string{"catalog."}},
	{"## Retention", []string{"retention."}},
	{"## HTTP, telemetry and log", []string{"http.", "otlp.", "log."}},
}

// TestConfigurationPage: the page has a table of the program's keys under each heading, as `walpost config example` tells of
// them: keys, variables, defaults, limits and meanings.
func TestConfigurationPage(t *testing.T) {
	all := settings(walpost(t, "config", "example"))
	if len(all) < 40 {
		t.Fatalf("the example has only %d keys", len(all))
	}
	page := read(t, configurationPage)
	grouped := 0
	for _, g := range keyGroups {
		table := "| Key | Environment | Default | Values | What it does |\n| --- | --- | --- | --- | --- |\n"
		for _, prefix := range g.keys {
			for _, s := range all {
				if strings.HasPrefix(s.key, prefix) {
					table += s.row()
					grouped++
				}
			}
		}
		before, rest, found := strings.Cut(page, "\n"+g.heading+"\n")
		start := strings.Index(rest, "| Key |")
		if !found || start < 0 {
			t.Fatalf("%s has no table under %q", configurationPage, g.heading)
		}
		end := start
		for strings.HasPrefix(rest[end:], "|") {
			end += strings.Index(rest[end:], "\n") + 1
		}
		page = before + "\n" + g.heading + "\n" + rest[:start] + table + rest[end:]
	}
	if grouped != len(all) {
		t.Errorf("the page's headings have %d of %d keys", grouped, len(all))
	}
	if *update {
		if err := os.WriteFile(filepath.Join(root, configurationPage), []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if read(t, configurationPage) != page {
		t.Errorf("%s does not have the program's keys: run go test ./internal/docs -run ConfigurationPage -update", configurationPage)
	}
}

// row is the key's line of the table.
func (s setting) row() string {
	value := s.value
	if value != "" {
		value = "`" + value + "`"
	}
	line := "|"
	for _, cell := range []string{"`" + s.key + "`", "`" + s.env + "`", value, strings.ReplaceAll(s.limits, " | ", ", "), escaped(s.help)} {
		line += strings.TrimRight(" "+cell, " ") + " |"
	}
	return line + "\n"
}

// escaped keeps Markdown from reading a text as its own; code stays as it is.
func escaped(text string) string {
	parts := strings.Split(text, "`")
	for i := 0; i < len(parts); i += 2 {
		parts[i] = strings.NewReplacer(`\`, `\\`, "<", `\<`, "*", `\*`, "|", `\|`).Replace(parts[i])
	}
	return strings.Join(parts, "`")
}

// TestReadmeHasTheFirstSettings: the ten keys of README have the program's variables and defaults, and the page names the same
// ten.
func TestReadmeHasTheFirstSettings(t *testing.T) {
	all := settings(walpost(t, "config", "example"))
	var ten []string
	for _, row := range rows(section(t, "README.md", "## Settings")) {
		i := slices.IndexFunc(all, func(s setting) bool { return s.key == row[0] })
		if i < 0 || len(row) != 4 || row[1] != all[i].env || row[2] != all[i].value {
			t.Errorf("README.md has %q, which is not what the program has", row)
		}
		ten = append(ten, row[0])
	}
	if len(ten) != 10 {
		t.Errorf("README.md has %d keys", len(ten))
	}
	var first []string
	for i, part := range strings.Split(section(t, configurationPage, "## Set first"), "`") {
		if i%2 == 1 {
			first = append(first, part)
		}
	}
	same(t, configurationPage, first, ten)
}

// settings reads the example: above each key stands what it means, and a comment "# [ENV] limits".
func settings(example string) (all []setting) {
	type level struct {
		indent int
		name   string
	}
	var path []level
	var help []string
	env, limits := "", ""
	for line := range strings.Lines(example) {
		text := strings.TrimSpace(line)
		comment, isComment := strings.CutPrefix(text, "# ")
		if rest, ok := strings.CutPrefix(comment, "["); ok {
			env, limits, _ = strings.Cut(rest, "]")
		} else if isComment {
			help = append(help, comment)
		}
		if text == "" {
			help = nil
		}
		if text == "" || isComment {
			continue
		}
		indent := len(line) - len(strings.TrimLeft(line, " "))
		if item, ok := strings.CutPrefix(text, "- "); ok {
			text, indent = item, indent+2
			path[len(path)-1].name += "[]"
		}
		for len(path) > 0 && path[len(path)-1].indent >= indent {
			path = path[:len(path)-1]
		}
		key, value, _ := strings.Cut(text, ":")
		name := ""
		for _, l := range path {
			name += l.name + "."
		}
		if value == "" {
			path = append(path, level{indent, key})
			continue
		}
		all = append(all, setting{name + key, env, strings.Trim(value, ` "`), strings.TrimSpace(limits), strings.Join(help, " ")})
		help = nil
	}
	return all
}
