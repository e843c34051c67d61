package consume

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are those of one consumer in this process.
type metrics struct {
	registerer prometheus.Registerer
	consumer   string
	gaps       prometheus.Counter
	handled    *prometheus.CounterVec
	failures   *prometheus.CounterVec
	lag        *prometheus.Desc
	parked     prometheus.Gauge
	dead       prometheus.Gauge

	mu    sync.Mutex      // guards below
	feed  *feed           // of the session, nil between two
	types map[string]bool // the labels in use; true: it had a lag
}

// mostTypes bounds the labels: anybody who may publish chooses event types. Further ones, and those that are
// longer than longestType bytes, are "other".
const mostTypes, longestType = 200, 100

func newMetrics(c *Config) (*metrics, error) {
	name := prometheus.Labels{"consumer": c.Name}
	vector := func(metric, help string) *prometheus.CounterVec {
		opts := prometheus.CounterOpts{Name: metric, Help: help, ConstLabels: name}
		return prometheus.NewCounterVec(opts, []string{"event_type"})
	}
	gauge := func(metric, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: metric, Help: help, ConstLabels: name})
	}
	m := &metrics{
		consumer: c.Name, types: map[string]bool{},
		gaps: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "consumer_gap_total", ConstLabels: name,
			Help: "How often the stream's limits had deleted events before they were read.",
		}),
		handled:  vector("consumer_processed_total", "Events whose effect was committed by this process."),
		failures: vector("consumer_failures_total", "Failed attempts of this process's handler."),
		lag: prometheus.NewDesc("consumer_lag_seconds",
			"Age of the oldest event that this process has read and not settled; 0 where none waits.",
			[]string{"event_type"}, name),
		parked: gauge("consumer_parked", "Events that failed and are tried again, and those behind them."),
		dead:   gauge("consumer_dead_letters", "Events that failed too often."),
	}
	if c.Metrics == nil {
		return m, nil
	}
	m.registerer = c.Metrics
	return m, m.registerer.Register(m)
}

func (m *metrics) unregister() {
	if m.registerer != nil {
		m.registerer.Unregister(m)
	}
}

func (m *metrics) processed(eventType string) { m.handled.WithLabelValues(m.label(eventType)).Inc() }

func (m *metrics) failed(eventType string) { m.failures.WithLabelValues(m.label(eventType)).Inc() }

func (m *metrics) label(eventType string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.labelLocked(eventType)
}

// labelLocked is called with the lock. A label that is not UTF-8 would panic.
func (m *metrics) labelLocked(eventType string) string {
	name := storable(eventType)
	if _, known := m.types[name]; known {
		return name
	}
	if len(m.types) >= mostTypes || len(name) > longestType {
		return "other"
	}
	m.types[name] = false
	return name
}

// observe takes the lag from the queues of a session.
func (m *metrics) observe(f *feed) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.feed = f
}

// Describe implements [prometheus.Collector].
func (m *metrics) Describe(out chan<- *prometheus.Desc) {
	out <- m.lag
	for _, c := range m.collectors() {
		c.Describe(out)
	}
}

// Collect implements [prometheus.Collector].
func (m *metrics) Collect(out chan<- prometheus.Metric) {
	for _, c := range m.collectors() {
		c.Collect(out)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	oldest := map[string]time.Time{}
	for eventType, at := range m.feed.oldest() {
		name := m.labelLocked(eventType)
		if before, found := oldest[name]; !found || at.Before(before) {
			oldest[name] = at
		}
		m.types[name] = true
	}
	for name, lagged := range m.types {
		lag := 0.0
		if at, waits := oldest[name]; waits {
			lag = max(time.Since(at).Seconds(), 0)
		}
		if lagged {
			out <- prometheus.MustNewConstMetric(m.lag, prometheus.GaugeValue, lag, name)
		}
	}
}

func (m *metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.gaps, m.handled, m.failures, m.parked, m.dead}
}

// oldest is when the first event of each event_type in the queues was stored.
func (f *feed) oldest() map[string]time.Time {
	oldest := map[string]time.Time{}
	if f == nil {
		return oldest
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, q := range f.queues {
		for i := range q.events {
			e := &q.events[i]
			if at, found := oldest[e.Type]; !found || e.StoredAt.Before(at) {
				oldest[e.Type] = e.StoredAt
			}
		}
	}
	return oldest
}
