package relay

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
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
	slots        prometheus.Counter
	slotWait     prometheus.Gauge
}

// alarmNames are those that Relay.alarm is called with.
var alarmNames = []string{
	"comparison_given_up",
	"events_lost",
	"false_duplicate",
	"forged_message",
	"foreign_message",
	"inserted_marked",
	"missed_rows",
	"no_consumer",
	"no_progress",
	"nothing_to_compare",
	"phantoms",
	"publication_skipped",
	"rival",
	"row_locked",
	"row_unsettled",
	"rows_changed",
	"server_rolled_back",
	"slot_foreign",
	"slot_given_up",
	"slot_in_use",
	"slot_left",
	"slot_not_made",
	"slot_unreadable",
	"standby_slot",
	"stream_gone",
	"stream_replaced",
	"stream_rolled_back",
	"stream_unfit",
	"synchronous",
	"table_unfit",
	"undecodable",
	"unpublished",
	"unsendable",
	"wal_lost",
	"walsender_silent",
}

func newMetrics(registry prometheus.Registerer, r *Relay) *metrics {
	f := promauto.With(registry)
	gauge := func(name, help string, read func() float64) {
		f.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help}, read)
	}
	counts := func(read func(publish.Counts) int) func() float64 {
		return func() float64 {
			if s := r.current.Load(); s != nil {
				return float64(read(s.lane.Counts()))
			}
			return 0
		}
	}
	gauge("walpost_inflight_messages", "Messages without a PubAck.", counts(func(c publish.Counts) int { return c.Inflight }))
	gauge("walpost_inflight_bytes", "Bytes of messages without a PubAck.", counts(func(c publish.Counts) int { return c.InflightBytes }))
	gauge("walpost_stream_shared", "1 where several writers share the stream, 0 where it is this relay's alone.", func() float64 {
		if r.cfg.Stream.Shared {
			return 1
		}
		return 0
	})
	mode := f.NewGaugeVec(prometheus.GaugeOpts{Name: "walpost_mode", Help: "1 for the mode that the relay is in."}, []string{"mode"})
	gauge("walpost_held_aggregates", "Aggregates whose rows wait behind a failed one.", func() float64 {
		if s := r.current.Load(); s != nil && r.cfg.OnPoison != Skip {
			return float64(s.holds.aggregates())
		}
		return 0
	})
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
			Help: "WAL that can still be written before the slot is lost (max_slot_wal_keep_size); -1 is no limit.",
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
			Help: "Messages sent without a PubAck when the lane stopped; the WAL or the table brings their rows again.",
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
		mode: mode,
		slots: f.NewCounter(prometheus.CounterOpts{
			Name: "walpost_slots_created_total",
			Help: "Slots made, the first one included.",
		}),
		slotWait: f.NewGauge(prometheus.GaugeOpts{
			Name: "walpost_slot_creation_wait_seconds",
			Help: "How long the creation of the slot has been waiting for other transactions; 0 while none is made.",
		}),
	}
	for _, name := range alarmNames { // an increase from nothing is none to Prometheus
		m.alarms.WithLabelValues(name)
	}
	m.standBy()
	return m
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

// maxEventTypes bounds the label values: rows are hostile.
const maxEventTypes = 200

// refused counts a row that cannot be delivered through a fault of its own, and
// logs the first of its kind, and then one in ten seconds.
func (r *Relay) refused(ref outbox.Ref, eventType string, failure *publish.RowError) {
	name := r.eventTypeLabel(eventType, failure.Class)
	r.metrics.failures.WithLabelValues(name, failure.Class).Inc()
	if r.limited("refused/"+name+"/"+failure.Class, 10*time.Second) {
		return
	}
	r.log.Warn("a row cannot be delivered: its failure is recorded", zap.Stringer("row", ref), zap.String("event_type", eventType),
		zap.String("class", failure.Class), zap.String("failure", failure.Reason))
}

// buried logs a row that has become a dead letter, and then one in ten seconds.
func (r *Relay) buried(ref outbox.Ref, failure string) {
	if !r.limited("buried", 10*time.Second) {
		r.log.Warn("a row has become a dead letter: see `walpost dlq list`", zap.Stringer("row", ref), zap.String("failure", failure))
	}
}

func (r *Relay) eventTypeLabel(name, class string) string {
	r.status.mu.Lock()
	defer r.status.mu.Unlock()
	if len(r.eventTypes) < maxEventTypes && len(name) <= 100 && class != publish.RowSubject {
		r.eventTypes[name] = struct{}{}
	}
	if _, ok := r.eventTypes[name]; !ok {
		return "other"
	}
	return name
}

// observe keeps the gauges that cost a query, each time on a connection of its
// own: a slow one must not hold up the marks, nor cost the lock.
func (r *Relay) observe(ctx context.Context) (done chan struct{}) {
	done = make(chan struct{})
	go func() {
		defer close(done)
		for {
			if err := r.observeOnce(ctx); err != nil && ctx.Err() == nil {
				r.trouble("cannot read gauges", err)
			}
			if !sleep(ctx, 10*time.Second) {
				return
			}
		}
	}()
	return done
}

func (r *Relay) observeOnce(ctx context.Context) error {
	db, err := fallback.Open(ctx, r.database())
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.Limit(ctx, 2*time.Second); err != nil {
		return err
	}
	var oldest time.Duration
	var errs []error
	for _, t := range r.cfg.Outboxes {
		age, err := db.OldestPending(ctx, t)
		oldest = max(oldest, age)
		errs = append(errs, err)
	}
	if errors.Join(errs...) == nil { // an alert must not end because nobody can look
		r.metrics.lag.Set(oldest.Seconds())
	}
	slot, err := db.Slot(ctx)
	if err == nil {
		r.metrics.retained.Set(float64(slot.Retained))
		r.metrics.safe.Set(float64(slot.Safe))
		r.metrics.confirmedLag.Set(float64(slot.ConfirmedLag))
	}
	dead, err2 := db.DeadLetterCount(ctx, 100_000)
	if err2 == nil {
		r.metrics.dlqDepth.Set(float64(dead))
	}
	if fallback.Code(err2) == "42P01" {
		err2 = nil // no dead letter table, no dead letters
	}
	return errors.Join(append(errs, err, err2)...)
}
