package docs

import (
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/collectors"
)

const rulesFile = "deploy/prometheus/walpost.rules.yaml"

// rules are the alerts and the recordings of the one group.
func rules(t *testing.T) (all []node) {
	t.Helper()
	group := document(t, rulesFile).at("groups", 0, "rules")
	for i := range group.any.([]any) {
		all = append(all, group.at(i))
	}
	return all
}

func (n node) has(key string) bool { _, ok := n.any.(map[string]any)[key]; return ok }

// TestAlertsSayWhatToDo: each has its wait, a severity, a summary, and its own heading of ALARMS as
// its runbook; that of WalpostAlarm is the alarm's.
func TestAlertsSayWhatToDo(t *testing.T) {
	headings := anchors(read(t, alarmsFile))
	for _, r := range rules(t) {
		if r.has("record") {
			continue
		}
		name := r.at("alert").text()
		r.at("for")
		r.at("labels", "severity")
		r.at("annotations", "summary")
		link := r.at("annotations", "runbook_url").text()
		heading, ours := strings.CutPrefix(link, "https://github.com/walpost/walpost/blob/main/"+alarmsFile+"#")
		exists := heading == strings.ToLower(name) && slices.Contains(headings, heading)
		if name == "WalpostAlarm" {
			exists = heading == "{{ $labels.alarm }}"
		}
		if !ours || !exists {
			t.Errorf("%s links to %s: no such heading", name, link)
		}
	}
}

// TestEveryAlarmAlerts: the alert takes all of them, and tells the critical ones.
func TestEveryAlarmAlerts(t *testing.T) {
	told := false
	for _, r := range rules(t) {
		expr := r.at("expr").text()
		if strings.Contains(expr, "walpost_alarms") && regexp.MustCompile(`walpost_alarms\w*(:\w+)?\{`).MatchString(expr) {
			t.Errorf("%s leaves alarms out", expr)
		}
		if r.has("alert") && r.at("alert").text() == "WalpostAlarm" {
			told = critical.MatchString(r.at("labels", "severity").text())
		}
	}
	if !told {
		t.Error("there is no alert WalpostAlarm that says which alarms are critical")
	}
}

// TestEveryAlertIsTested, by promtool's tests, which are not run here.
func TestEveryAlertIsTested(t *testing.T) {
	tests := read(t, "deploy/prometheus/walpost.rules_test.yaml")
	for _, r := range rules(t) {
		if r.has("alert") && !regexp.MustCompile(`\b`+r.at("alert").text()+`\b`).MatchString(tests) {
			t.Errorf("deploy/prometheus/walpost.rules_test.yaml does not test %s", r.at("alert").text())
		}
	}
}

// known are the labels of each series that can be asked for, by its name.
func known(t *testing.T) map[string][]string {
	t.Helper()
	var r recorder
	r.MustRegister(collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	r.metrics = append(r.metrics, metrics(t)...)
	series := map[string][]string{}
	for _, m := range r.metrics {
		name, labels, _ := strings.Cut(strings.TrimSuffix(m, "}"), "{")
		all := append(strings.FieldsFunc(labels, func(r rune) bool { return r == ',' }), "job", "instance")
		series[name] = all
		series[name+"_bucket"] = append(slices.Clone(all), "le")
	}
	for _, rule := range rules(t) {
		if rule.has("record") {
			level, _, _ := strings.Cut(rule.at("record").text(), ":") // named after its labels
			series[rule.at("record").text()] = strings.Split(level, "_")
		}
	}
	return series
}

var (
	quoted   = regexp.MustCompile(`"[^"]*"`)
	span     = regexp.MustCompile(`\[[^]]*\]|offset \w+`)
	selector = regexp.MustCompile(`([a-zA-Z_:][\w:]*)\s*(?:\{([^}]*)\})?`)
	matcher  = regexp.MustCompile(`(\w+)\s*[=!][=~]?`)
	grouping = regexp.MustCompile(`\b(?:by|on) \(([^)]*)\)`)
	language = strings.Fields("and or unless absent increase rate sum max min count topk group time histogram_quantile e9")
)

// TestExpressionsNameWhatExists, in the alerts and in the dashboard: series, and their labels.
func TestExpressionsNameWhatExists(t *testing.T) {
	series := known(t)
	exprs := map[string]string{}
	for _, r := range rules(t) {
		exprs[r.at("expr").text()] = rulesFile
	}
	for _, file := range dashboards {
		panels := document(t, file).at("panels")
		for i := range panels.any.([]any) {
			targets := panels.at(i, "targets")
			for j := range targets.any.([]any) {
				exprs[targets.at(j, "expr").text()] = targets.file
			}
		}
	}
	if len(exprs) < 30 {
		t.Fatalf("found only %d expressions", len(exprs))
	}
	for expr, file := range exprs {
		checkExpr(t, file, expr, series)
	}
}

func checkExpr(t *testing.T, file, expr string, series map[string][]string) {
	t.Helper()
	text := span.ReplaceAllString(quoted.ReplaceAllString(expr, `""`), "")
	labels := map[string]bool{}
	for _, m := range selector.FindAllStringSubmatch(grouping.ReplaceAllString(text, ""), -1) {
		has, exists := series[m[1]]
		if !exists && !slices.Contains(language, m[1]) {
			t.Errorf("%s: %s is no series of walpost's, in %s", file, m[1], expr)
		}
		for _, l := range has {
			labels[l] = true
		}
		for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
			if !slices.Contains(has, l[1]) {
				t.Errorf("%s: %s has no label %s, in %s", file, m[1], l[1], expr)
			}
		}
	}
	for _, m := range grouping.FindAllStringSubmatch(text, -1) {
		for l := range strings.SplitSeq(m[1], ",") {
			if !labels[strings.TrimSpace(l)] {
				t.Errorf("%s: nothing has a label %q, in %s (there are %v)", file, l, expr, slices.Sorted(maps.Keys(labels)))
			}
		}
	}
}

var dashboards = []string{"deploy/grafana/walpost.json", "deploy/grafana/walpost-fleet.json"}

// TestDashboardsAskForTheirDataSource: it is nobody's own.
func TestDashboardsAskForTheirDataSource(t *testing.T) {
	for _, file := range dashboards {
		asksForItsDataSource(t, document(t, file))
	}
}

func asksForItsDataSource(t *testing.T, dashboard node) {
	t.Helper()
	if got := dashboard.at("templating", "list", 0, "type").text(); got != "datasource" {
		t.Errorf("the first variable is a %s", got)
	}
	ids := map[any]bool{}
	panels := dashboard.at("panels")
	for i := range panels.any.([]any) {
		p := panels.at(i)
		if uid := p.at("datasource", "uid").text(); uid != "${datasource}" {
			t.Errorf("panel %q asks %s", p.at("title").any, uid)
		}
		if id := p.at("id").any; ids[id] {
			t.Errorf("two panels are number %v", id)
		} else {
			ids[id] = true
		}
	}
}
