package relay_test

import (
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
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
	var got, want []string
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == "walpost_alarms_total" && m.GetCounter().GetValue() == 0 {
				got = append(got, m.GetLabel()[0].GetValue())
			}
		}
	}
	for _, a := range alarm.All() {
		want = append(want, a.Name())
	}
	if !slices.Equal(got, want) {
		t.Errorf("at zero are %v, want %v", got, want)
	}
}
