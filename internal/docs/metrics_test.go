package docs

import (
	"path/filepath"
	"regexp"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/relay"
)

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

// TestMetricsPage compares the table with what is registered.
func TestMetricsPage(t *testing.T) {
	var documented []string
	for _, row := range rows(section(t, "docs/METRICS.md", "## Series")) {
		documented = append(documented, row[0])
	}
	same(t, "docs/METRICS.md", documented, metrics(t))
}
