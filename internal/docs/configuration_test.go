package docs

import (
	"strings"
	"testing"
)

type setting struct{ key, env, value string }

// TestConfigurationPage compares the table with the example that the
// program prints: keys, their order, environment variables and defaults.
func TestConfigurationPage(t *testing.T) {
	want := settings(walpost(t, "config", "example"))
	if len(want) < 40 {
		t.Fatalf("the example has only %d keys", len(want))
	}
	got := rows(section(t, "docs/CONFIGURATION.md", "## Keys"))
	for i, w := range want {
		if i >= len(got) {
			t.Errorf("the table lacks | `%s` | `%s` | `%s` |", w.key, w.env, w.value)
			continue
		}
		if g := got[i]; len(g) != 4 || g[0] != w.key || g[1] != w.env || g[2] != w.value {
			t.Errorf("row %d of the table is %q, want | `%s` | `%s` | `%s` |", i+1, g, w.key, w.env, w.value)
		}
	}
	for _, g := range got[min(len(got), len(want)):] {
		t.Errorf("the table has %q, which the program does not know", g)
	}
}

// settings reads the example: a comment "# [ENV] limits" stands above each key.
func settings(example string) (all []setting) {
	type level struct {
		indent int
		name   string
	}
	var path []level
	env := ""
	for line := range strings.Lines(example) {
		text := strings.TrimSpace(line)
		if rest, ok := strings.CutPrefix(text, "# ["); ok {
			env, _, _ = strings.Cut(rest, "]")
		}
		if text == "" || text[0] == '#' {
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
		all = append(all, setting{name + key, env, strings.Trim(value, ` "`)})
	}
	return all
}
