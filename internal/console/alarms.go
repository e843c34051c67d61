package console

import (
	"cmp"
	"net/http"
	"slices"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/walpost/walpost/internal/alarm"
)

// alarmFor is for how long an alarm counts as active after it was raised: as in the rule WalpostAlarm.
const alarmFor = 15 * time.Minute

// raisedAlarm is an alarm that a relay has raised.
type raisedAlarm struct {
	count float64
	at    time.Time // when the last one was noticed; zero where it was raised before anybody looked
}

type alarmAnswer struct {
	Alarm    string     `json:"alarm"`
	Severity string     `json:"severity"`
	Summary  string     `json:"summary"`
	Count    float64    `json:"count"`
	LastAt   *time.Time `json:"last_at"`
	Active   bool       `json:"active"`
	Runbook  string     `json:"runbook"`
}

// noteAlarms compares the counters with those of the last look.
func (h *history) noteAlarms(now time.Time, m metrics) {
	begun := m.gauge("process_start_time_seconds")
	h.mu.Lock()
	defer h.mu.Unlock()
	first := h.alarms == nil
	if first {
		h.alarms = map[string]*raisedAlarm{}
	}
	if at := time.UnixMilli(int64(begun * 1000)); begun > 0 && !at.Equal(h.begun) {
		// Another process counts from 0. One that has just begun has raised what it has raised just now.
		h.begun = at
		clear(h.alarms)
		first = now.Sub(at) > 3*sampleEvery
	}
	m.each("walpost_alarms_total", func(one *dto.Metric) {
		name, count := label(one, "alarm"), one.GetCounter().GetValue()
		known := h.alarms[name]
		switch {
		case count == 0:
		case known == nil && first:
			h.alarms[name] = &raisedAlarm{count: count}
		case known == nil || count != known.count:
			h.alarms[name] = &raisedAlarm{count, now}
		}
	})
}

func (c *Console) alarms(http.ResponseWriter, *http.Request) (any, error) {
	c.look()
	return map[string]any{"alarms": c.history.raised(time.Now())}, nil
}

// raised are the alarms since the relay's start, the newest first.
func (h *history) raised(now time.Time) []alarmAnswer {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := []alarmAnswer{}
	for name, raised := range h.alarms {
		a := alarmAnswer{
			Alarm: name, Severity: alarm.Warning, Count: raised.count,
			Active:  now.Sub(h.begun) < alarmFor || !raised.at.IsZero() && now.Sub(raised.at) < alarmFor,
			Runbook: "docs/ALARMS.html#" + name,
		}
		if known := alarm.Find(name); known != nil { // nil: a relay of another version
			a.Severity, a.Summary = known.Severity(), known.Meaning()
		}
		if !raised.at.IsZero() {
			at := raised.at.UTC()
			a.LastAt = &at
		}
		all = append(all, a)
	}
	slices.SortFunc(all, func(a, b alarmAnswer) int {
		return cmp.Or(h.alarms[b.Alarm].at.Compare(h.alarms[a.Alarm].at), cmp.Compare(a.Alarm, b.Alarm))
	})
	return all
}
