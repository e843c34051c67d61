package relay_test

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/relay"
)

// TestEveryAlarmBeginsAtZero: an alert on an increase needs something to increase from.
func TestEveryAlarmBeginsAtZero(t *testing.T) {
	registry := prometheus.NewRegistry()
	if _, err := relay.New(relay.Config{Subject: "events.{event_type}"}, zap.NewNop(), registry); err != nil {
		t.Fatal(err)
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]bool{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "walpost_alarms_total" && m.GetCounter().GetValue() == 0 {
				got[m.GetLabel()[0].GetValue()] = true
			}
		}
	}
	files, err := filepath.Glob("../*/*.go") // relay and fallback
	if err != nil {
		t.Fatal(err)
	}
	raised := map[string]bool{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\b[aA]larm\("(\w+)"`).FindAllSubmatch(text, -1) {
			if !strings.HasSuffix(file, "_test.go") {
				raised[string(m[1])] = true
			}
		}
	}
	if len(raised) == 0 || !maps.Equal(got, raised) {
		t.Errorf("at zero are %v, raised are %v", slices.Sorted(maps.Keys(got)), slices.Sorted(maps.Keys(raised)))
	}
}
