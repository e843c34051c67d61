package console

import (
	"math"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// metrics are a relay's, by name.
type metrics map[string]*dto.MetricFamily

func indexed(families []*dto.MetricFamily) metrics {
	m := metrics{}
	for _, f := range families {
		m[f.GetName()] = f
	}
	return m
}

// each is called with the metrics of a name.
func (m metrics) each(name string, do func(*dto.Metric)) {
	if f := m[name]; f != nil {
		for _, one := range f.GetMetric() {
			do(one)
		}
	}
}

// gauge is a gauge without labels.
func (m metrics) gauge(name string) float64 {
	value := unknown
	m.each(name, func(one *dto.Metric) { value = one.GetGauge().GetValue() })
	return value
}

// sum adds up a counter over its labels.
func (m metrics) sum(name string) (total float64) {
	m.each(name, func(one *dto.Metric) { total += one.GetCounter().GetValue() })
	return total
}

func (m metrics) mode() (mode string) {
	m.each("walpost_mode", func(one *dto.Metric) {
		if one.GetGauge().GetValue() == 1 {
			mode = label(one, "mode")
		}
	})
	return mode
}

func label(one *dto.Metric, name string) string {
	for _, l := range one.GetLabel() {
		if l.GetName() == name {
			return l.GetValue()
		}
	}
	return ""
}

// counters are what only their differences tell.
type counters struct {
	at               time.Time // zero: nothing is known
	stored, failures float64
	latency          []*dto.Bucket // cumulative
}

func (m metrics) counters(now time.Time) counters {
	c := counters{
		at: now, stored: m.sum("outbox_throughput_total"), failures: m.sum("outbox_failures_total"),
	}
	m.each("walpost_commit_to_ack_seconds", func(one *dto.Metric) {
		c.latency = one.GetHistogram().GetBucket()
	})
	return c
}

// since is what has happened since an earlier look: rows a second, and quantiles in seconds. Another process
// counts from 0 again; then it is not known.
func (c counters) since(before counters) (rate, failures, p50, p99 float64) {
	took := c.at.Sub(before.at).Seconds()
	if before.at.IsZero() || took <= 0 || c.stored < before.stored || c.failures < before.failures {
		return unknown, unknown, unknown, unknown
	}
	rate, failures = (c.stored-before.stored)/took, (c.failures-before.failures)/took
	return rate, failures, quantile(0.5, c.latency, before.latency), quantile(0.99, c.latency, before.latency)
}

// quantile is Prometheus's histogram_quantile over what came since an earlier look.
func quantile(q float64, now, before []*dto.Bucket) float64 {
	if len(now) == 0 || len(now) != len(before) {
		return unknown
	}
	counts := make([]float64, len(now))
	for i := range now {
		counts[i] = float64(now[i].GetCumulativeCount()) - float64(before[i].GetCumulativeCount())
	}
	all := counts[len(counts)-1]
	if all <= 0 {
		return unknown
	}
	rank, low, under := q*all, 0.0, 0.0
	for i, b := range now {
		high := b.GetUpperBound()
		if counts[i] >= rank {
			if math.IsInf(high, 1) {
				return low
			}
			return low + (high-low)*(rank-under)/max(counts[i]-under, 1)
		}
		low, under = high, counts[i]
	}
	return low
}
