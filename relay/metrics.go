package relay

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/publish"
)

type metrics struct {
	lag          prometheus.Gauge
	throughput   prometheus.Counter
	failures     *prometheus.CounterVec
	dlqDepth     prometheus.Gauge
	retained     prometheus.Gauge
	safe         prometheus.Gauge
	confirmedLag prometheus.Gauge
	latency      prometheus.Histogram
	sessions     *prometheus.CounterVec
	retries      *prometheus.CounterVec
	alarms       *prometheus.CounterVec
	lost         prometheus.Counter
	missed       prometheus.Counter
	mode         *prometheus.GaugeVec
	postgres     *prometheus.GaugeVec
	slots        prometheus.Counter
	slotWait     prometheus.Gauge

	replayed      prometheus.Counter
	kept          prometheus.Gauge
	searches      prometheus.Counter
	searchRows    prometheus.Counter
	searchSeconds prometheus.Counter
	replayPending prometheus.Gauge
}

func newMetrics(registry prometheus.Registerer) *metrics {
	f := promauto.With(registry)
	m := &metrics{
		lag: f.NewGauge(prometheus.GaugeOpts{
			Name: "outbox_lag_seconds",
			Help: "Age of the oldest due, unprocessed row.",
		}),
		throughput: f.NewCounter(prometheus.CounterOpts{
			Name: "outbox_throughput_total",
			Help: "Events stored in the stream.",
		}),
		failures: f.NewCounterVec(prometheus.CounterOpts{
			Name: "outbox_failures_total",
			Help: "Rows that could not be delivered through a fault of their own.",
		}, []string{"event_type", "class"}),
		dlqDepth: f.NewGauge(prometheus.GaugeOpts{
			Name: "outbox_dlq_depth",
			Help: "Dead letters (counted up to 100000).",
		}),
		retained: f.NewGauge(prometheus.GaugeOpts{
			Name: "walpost_slot_retained_bytes",
			Help: "WAL that the slot makes the server keep.",
		}),
		safe: f.NewGauge(prometheus.GaugeOpts{
			Name: "walpost_slot_safe_bytes",
			Help: "WAL that can still be written before the slot is lost (max_slot_wal_keep_size); -1 is " +
				"no limit.",
		}),
		confirmedLag: f.NewGauge(prometheus.GaugeOpts{
			Name: "walpost_confirmed_lag_bytes",
			Help: "WAL written after the confirmed LSN.",
		}),
		latency: f.NewHistogram(prometheus.HistogramOpts{
			Name:    "walpost_commit_to_ack_seconds",
			Help:    "From the commit timestamp (the server's clock) to the PubAck (the relay's clock).",
			Buckets: prometheus.ExponentialBuckets(0.0001, 2, 20),
		}),
		sessions: f.NewCounterVec(prometheus.CounterOpts{
			Name: "walpost_sessions_total",
			Help: "Sessions that ended, by reason.",
		}, []string{"reason"}),
		retries: f.NewCounterVec(prometheus.CounterOpts{
			Name: "walpost_publish_retries_total",
			Help: "Messages sent without a PubAck when the publisher stopped; the WAL or the table brings " +
				"their rows again.",
		}, []string{"reason"}),
		alarms: f.NewCounterVec(prometheus.CounterOpts{
			Name: "walpost_alarms_total",
			Help: "Things that an operator must know of; docs/ALARMS.md has a heading for each.",
		}, []string{"alarm"}),
		lost: f.NewCounter(prometheus.CounterOpts{
			Name: "walpost_lost_events_total",
			Help: "Rows marked as stored that the stream was found not to hold.",
		}),
		missed: f.NewCounter(prometheus.CounterOpts{
			Name: "walpost_missed_rows_total",
			Help: "Rows that the WAL did not bring: the table delivered them, late.",
		}),
		mode: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "walpost_mode",
			Help: "1 for the mode that the relay is in.",
		}, []string{"mode"}),
		postgres: f.NewGaugeVec(prometheus.GaugeOpts{
			Name: "walpost_postgres_info",
			Help: "1 for the PostgreSQL server of the relay's term.",
		}, []string{"address", "timeline", "started"}),
		slots: f.NewCounter(prometheus.CounterOpts{
			Name: "walpost_slots_created_total",
			Help: "Slots made, the first one included.",
		}),
		slotWait: f.NewGauge(prometheus.GaugeOpts{
			Name: "walpost_slot_creation_wait_seconds",
			Help: "How long the creation of the slot has been waiting for other transactions; 0 while none " +
				"is made.",
		}),
	}
	m.kept = f.NewGauge(prometheus.GaugeOpts{
		Name: "walpost_retention_kept_partitions",
		Help: "Partitions whose time has come, and that retention keeps for rows that no relay " +
			"has delivered.",
	})
	m.searches = f.NewCounter(prometheus.CounterOpts{
		Name: "walpost_whole_searches_total",
		Help: "Searches of a whole append-only table that have found no row pending.",
	})
	m.searchRows = f.NewCounter(prometheus.CounterOpts{
		Name: "walpost_whole_search_rows_total",
		Help: "Rows without an entry in the journal that they have looked at.",
	})
	m.searchSeconds = f.NewCounter(prometheus.CounterOpts{
		Name: "walpost_whole_search_seconds_total",
		Help: "How long they have taken.",
	})
	m.replayed = f.NewCounter(prometheus.CounterOpts{
		Name: "walpost_replay_messages_total",
		Help: "Messages of rows that were published again on request, stored in the stream.",
	})
	m.replayPending = f.NewGauge(prometheus.GaugeOpts{
		Name: "walpost_replay_pending_rows",
		Help: "Rows that are still to be published again for the request that is being fulfilled.",
	})
	for _, a := range alarm.All() { // an increase from nothing is none to Prometheus
		m.alarms.WithLabelValues(a.Name())
	}
	m.standBy()
	return m
}

// setMode says which mode the relay is in.
func (m *metrics) setMode(mode string) {
	for _, name := range []string{modeStream, modePoll} {
		on := 0.0
		if name == mode {
			on = 1
		}
		m.mode.WithLabelValues(name).Set(on)
	}
}

// standBy sets what only the active relay looks at: where another one does, nothing stays
// that was true once, for an alert would never end. A relay that cannot look keeps what it
// saw.
func (m *metrics) standBy() {
	for _, g := range []prometheus.Gauge{m.lag, m.dlqDepth, m.retained, m.confirmedLag, m.slotWait} {
		g.Set(0)
	}
	m.safe.Set(-1)
	m.mode.Reset()
}

// observe notes the time from a commit to its PubAck, with the trace as an exemplar where there is one.
func (m *metrics) observe(d time.Duration, t publish.Trace) {
	if row, ok := t.(*rowTrace); ok && row.id != "" {
		labels := prometheus.Labels{"trace_id": row.id}
		m.latency.(prometheus.ExemplarObserver).ObserveWithExemplar(d.Seconds(), labels)
		return
	}
	m.latency.Observe(d.Seconds())
}
