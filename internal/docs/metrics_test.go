package docs

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/relay"
)

// recorder is a registry that records descriptions, each with its collector.
type recorder struct {
	metrics    []string
	collectors []prometheus.Collector
}

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
		r.metrics, r.collectors = append(r.metrics, m[1]), append(r.collectors, c)
	}
	return nil
}

var commandMetric = regexp.MustCompile(`prometheus\.New(\w+)\(prometheus\.\w+\{\s+Name:\s+"(\w+)"`)

// metrics are those of the relay, with their labels, and those that the program
// itself adds.
func metrics(t *testing.T) (names []string) {
	t.Helper()
	for name := range metricTypes(t) {
		names = append(names, name)
	}
	return names
}

// metricTypes are "counter", "gauge" or "histogram", by the names that metrics has.
func metricTypes(t *testing.T) map[string]string {
	t.Helper()
	var r recorder
	if _, err := relay.New(relay.Config{Subject: "events.{event_type}"}, zap.NewNop(), &r); err != nil {
		t.Fatal(err)
	}
	types := map[string]string{}
	for i, c := range r.collectors {
		types[r.metrics[i]] = typeOf(t, c)
	}
	files, err := filepath.Glob(filepath.Join(root, "cmd/walpost/*.go"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		name, _ := filepath.Rel(root, f)
		for _, m := range commandMetric.FindAllStringSubmatch(read(t, name), -1) {
			types[m[2]] = strings.ToLower(m[1])
		}
	}
	return types
}

// typeOf asks a collector by way of a registry, and one that has no labels' values yet by its Go type.
func typeOf(t *testing.T, c prometheus.Collector) string {
	t.Helper()
	switch c.(type) {
	case *prometheus.CounterVec:
		return "counter"
	case *prometheus.GaugeVec:
		return "gauge"
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(c)
	families, err := registry.Gather()
	if err != nil || len(families) != 1 {
		t.Fatalf("a collector has %d metrics: %v", len(families), err)
	}
	return strings.ToLower(families[0].GetType().String())
}

const metricsPage = "docs/METRICS.md"

// TestMetricsPage compares the tables with what is registered: names, labels and types.
func TestMetricsPage(t *testing.T) {
	types := metricTypes(t)
	var documented []string
	for _, row := range rows(section(t, metricsPage, "## Series")) {
		documented = append(documented, row[0])
		if want := types[row[0]]; len(row) != 4 || row[1] != want {
			t.Errorf("%s has %q, the program registers a %s", metricsPage, row, want)
		}
	}
	same(t, metricsPage, documented, metrics(t))
}

var alertLink = regexp.MustCompile("\\[`(\\w+)`\\]")

// TestMetricsPageNamesTheAlerts: each metric has the alerts whose expression asks for it.
func TestMetricsPageNamesTheAlerts(t *testing.T) {
	recorded := map[string]string{}
	for _, r := range rules(t) {
		if r.has("record") {
			recorded[r.at("record").text()] = r.at("expr").text()
		}
	}
	for _, row := range rows(section(t, metricsPage, "## Series")) {
		name, _, _ := strings.Cut(row[0], "{")
		asked := regexp.MustCompile(`\b` + name + `(_bucket)?\b`)
		var want []string
		for _, r := range rules(t) {
			expr := r.at("expr").text()
			if r.has("alert") && (asked.MatchString(expr) || asked.MatchString(recorded[expr])) {
				want = append(want, r.at("alert").text())
			}
		}
		if got := headings(alertLink, row[len(row)-1]); !slices.Equal(got, want) {
			t.Errorf("%s has the alerts %q for %s, the rules have %q", metricsPage, got, name, want)
		}
	}
}
