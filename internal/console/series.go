package console

import (
	"context"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	dto "github.com/prometheus/client_model/go"

	"github.com/walpost/walpost/internal/status"
)

const (
	// sampleEvery is the distance between two points of the time series.
	sampleEvery = 2 * time.Second
	// mostPoints are those of an hour.
	mostPoints = int(time.Hour / sampleEvery)
)

// unknown is a value that is not known. In JSON it is null.
var unknown = math.NaN()

// point is what was known at one time.
type point struct {
	at                   time.Time
	rate, failures       float64 // a second, since the point before
	lag, p50, p99        float64 // seconds
	retained, confirmed  float64 // bytes
	inflight, held, dead float64
	mode                 string // empty where none is known
}

func newPoint(at time.Time) point {
	u := unknown
	return point{
		at: at, rate: u, failures: u, lag: u, p50: u, p99: u,
		retained: u, confirmed: u, inflight: u, held: u, dead: u,
	}
}

// history is the last hour.
type history struct {
	mu     sync.Mutex // guards what follows
	points []point    // oldest first
	alarms map[string]*raisedAlarm
	begun  time.Time // of the relay's process; zero is not known

	// What follows is the sampler's alone.
	before counters
	last   uint64 // sequence of the stream, where the metrics cannot be read
	lastAt time.Time
}

// sample adds a point. Where the relay's metrics cannot be read, the questions of the overview are asked
// instead, as long as somebody looks.
func (c *Console) sample(ctx context.Context, now time.Time) {
	ctx, cancel := context.WithTimeout(ctx, relayPatience)
	families, err := c.cfg.Metrics(ctx)
	cancel()
	if err == nil {
		c.history.addMetrics(now, families)
		return
	}
	if !c.lookedSince(now.Add(-keepIdle)) {
		return
	}
	value, err := c.onceUnseen(ctx, "status", keepAnswer, c.report)
	if err == nil {
		c.history.addReport(now, value.(*status.Report))
	}
}

func (h *history) add(p point) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(h.points); n >= mostPoints {
		h.points = append(h.points[:0], h.points[n-mostPoints+1:]...)
	}
	h.points = append(h.points, p)
}

// addMetrics takes the point of a relay's metrics.
func (h *history) addMetrics(now time.Time, families []*dto.MetricFamily) {
	m := indexed(families)
	p := newPoint(now)
	if p.mode = m.mode(); p.mode != "" { // a relay that stands by sets them to 0
		p.lag, p.retained = m.gauge("outbox_lag_seconds"), m.gauge("walpost_slot_retained_bytes")
		p.confirmed, p.dead = m.gauge("walpost_confirmed_lag_bytes"), m.gauge("outbox_dlq_depth")
		p.inflight, p.held = m.gauge("walpost_inflight_messages"), m.gauge("walpost_held_aggregates")
	}
	next := m.counters(now)
	p.rate, p.failures, p.p50, p.p99 = next.since(h.before)
	h.before, h.lastAt = next, time.Time{}
	h.add(p)
	h.noteAlarms(now, m)
}

// addReport takes the point of what the servers tell.
func (h *history) addReport(now time.Time, r *status.Report) {
	p := newPoint(now)
	if r.Relay != nil && r.Relay.Lock != nil {
		p.mode = r.Relay.Mode
	}
	if r.Slot != nil && r.Slot.Exists {
		p.retained, p.confirmed = float64(r.Slot.Retained), float64(r.Slot.ConfirmedLag)
	}
	if r.DeadLetters != nil {
		p.dead = float64(*r.DeadLetters)
	}
	for _, o := range r.Outboxes {
		if o.OldestDueAge != nil && !(p.lag >= *o.OldestDueAge) {
			p.lag = *o.OldestDueAge
		}
	}
	if s := r.Stream; s != nil && s.Exists {
		if took := now.Sub(h.lastAt).Seconds(); !h.lastAt.IsZero() && s.LastSeq >= h.last && took > 0 {
			p.rate = float64(s.LastSeq-h.last) / took
		}
		h.last, h.lastAt = s.LastSeq, now
	}
	h.before = counters{}
	h.add(p)
}

// column is a row of numbers of which some may be unknown.
type column []float64

// MarshalJSON writes null for what is not known.
func (c column) MarshalJSON() ([]byte, error) {
	out := make([]byte, 0, 2+8*len(c))
	out = append(out, '[')
	for i, v := range c {
		if i > 0 {
			out = append(out, ',')
		}
		if math.IsNaN(v) || math.IsInf(v, 0) {
			out = append(out, "null"...)
			continue
		}
		out = strconv.AppendFloat(out, v, 'f', -1, 64)
	}
	return append(out, ']'), nil
}

type seriesAnswer struct {
	Step      float64   `json:"step_seconds"`
	T         column    `json:"t"`
	Rate      column    `json:"rate"`
	Failures  column    `json:"failures"`
	Lag       column    `json:"lag_seconds"`
	P50       column    `json:"p50_ms"`
	P99       column    `json:"p99_ms"`
	Retained  column    `json:"retained_bytes"`
	Budget    column    `json:"budget_bytes"`
	Confirmed column    `json:"confirmed_lag_bytes"`
	Inflight  column    `json:"inflight"`
	Held      column    `json:"held"`
	Dead      column    `json:"dead_letters"`
	Mode      []*string `json:"mode"`
	Forecast  forecast  `json:"forecast"`
}

func (c *Console) series(_ http.ResponseWriter, r *http.Request) (any, error) {
	since, err := number(r, "since", 0, 0, math.MaxInt64)
	if err != nil {
		return nil, err
	}
	c.look()
	return c.history.read(time.UnixMilli(since), c.cfg.Budget), nil
}

// read is what came after a time.
func (h *history) read(since time.Time, budget int64) *seriesAnswer {
	h.mu.Lock()
	defer h.mu.Unlock()
	a := &seriesAnswer{Step: sampleEvery.Seconds(), Mode: []*string{}, Forecast: predict(h.points, budget)}
	limit := unknown
	if budget > 0 {
		limit = float64(budget)
	}
	for _, p := range h.points {
		if p.at.UnixMilli() <= since.UnixMilli() {
			continue
		}
		var mode *string
		if p.mode != "" {
			mode = &p.mode
		}
		a.Mode = append(a.Mode, mode)
		for _, x := range []struct {
			to    *column
			value float64
		}{
			{&a.T, float64(p.at.UnixMilli()) / 1000},
			{&a.Rate, p.rate},
			{&a.Failures, p.failures},
			{&a.Lag, p.lag},
			{&a.P50, p.p50 * 1000},
			{&a.P99, p.p99 * 1000},
			{&a.Retained, p.retained},
			{&a.Budget, limit},
			{&a.Confirmed, p.confirmed},
			{&a.Inflight, p.inflight},
			{&a.Held, p.held},
			{&a.Dead, p.dead},
		} {
			*x.to = append(*x.to, x.value)
		}
	}
	return a
}

// forecast says when the slot's WAL reaches its budget. nil is not known, or never.
type forecast struct {
	FullIn *float64 `json:"full_in_seconds"`
	Growth *float64 `json:"growth_bytes_per_second"`
}

const (
	// predictFrom is how much of the series a forecast goes by, and predictLeast how much it needs.
	predictFrom  = 5 * time.Minute
	predictLeast = 30 * time.Second
	// leastUsed is the part of the budget below which nothing is foreseen: the WAL between two
	// checkpoints, or what an outage has left, looks like growth.
	leastUsed = 0.01
)

// predict fits a line to the last minutes.
func predict(points []point, budget int64) (f forecast) {
	if len(points) == 0 {
		return f
	}
	end := points[len(points)-1].at
	var n, sumT, sumY, sumTT, sumTY, first, now float64
	for _, p := range points {
		t := p.at.Sub(end).Seconds()
		if math.IsNaN(p.retained) || t < -predictFrom.Seconds() {
			continue
		}
		if n == 0 {
			first = t
		}
		n, sumT, sumY, sumTT, sumTY = n+1, sumT+t, sumY+p.retained, sumTT+t*t, sumTY+t*p.retained
		now = p.retained
	}
	if n < 3 || -first < predictLeast.Seconds() {
		return f
	}
	growth := (n*sumTY - sumT*sumY) / (n*sumTT - sumT*sumT)
	f.Growth = &growth
	if growth > 0 && budget > 0 && now >= leastUsed*float64(budget) {
		left := max(0, float64(budget)-now) / growth
		f.FullIn = &left
	}
	return f
}
