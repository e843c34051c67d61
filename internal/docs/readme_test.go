package docs

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/relay"
)

type setting struct{ key, env, value string }

// TestReadmeTellsTheConfiguration compares the table with the example that the
// program prints: keys, their order, environment variables and defaults.
func TestReadmeTellsTheConfiguration(t *testing.T) {
	want := settings(walpost(t, "config", "example"))
	if len(want) < 40 {
		t.Fatalf("the example has only %d keys", len(want))
	}
	got := rows(section(t, "README.md", "## Configuration"))
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

// recorder is a registry that only remembers what was described to it.
type recorder struct{ metrics []string }

func (r *recorder) Unregister(prometheus.Collector) bool { return false }

func (r *recorder) MustRegister(cs ...prometheus.Collector) {
	for _, c := range cs {
		_ = r.Register(c)
	}
}

var description = regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)

func (r *recorder) Register(c prometheus.Collector) error {
	all := make(chan *prometheus.Desc, 16)
	c.Describe(all)
	close(all)
	for d := range all {
		m := description.FindStringSubmatch(d.String())
		if m[2] != "" {
			m[1] += "{" + m[2] + "}"
		}
		r.metrics = append(r.metrics, m[1])
	}
	return nil
}

var commandMetric = regexp.MustCompile(`Name:\s+"((?:outbox|walpost)_\w+)"`)

// metrics are those of the relay, with their labels, and those that the program
// itself adds.
func metrics(t *testing.T) []string {
	t.Helper()
	var r recorder
	if _, err := relay.New(relay.Config{Subject: "events.{event_type}"}, zap.NewNop(), &r); err != nil {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(root, "cmd/walpost/*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		name, _ := filepath.Rel(root, f)
		for _, m := range commandMetric.FindAllStringSubmatch(read(t, name), -1) {
			r.metrics = append(r.metrics, m[1])
		}
	}
	return r.metrics
}

func TestReadmeTellsTheMetrics(t *testing.T) {
	var documented []string
	for _, row := range rows(section(t, "README.md", "### Metrics")) {
		documented = append(documented, row[0])
	}
	same(t, "README.md", documented, metrics(t))
}
