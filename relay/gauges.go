package relay

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/publish"
)

// registerSessionGauges registers the gauges that ask the current session, which is nil where none runs.
func registerSessionGauges(registry prometheus.Registerer, cfg *Config, current func() *session) {
	f := promauto.With(registry)
	gauge := func(name, help string, read func() int) {
		f.NewGaugeFunc(prometheus.GaugeOpts{Name: name, Help: help},
			func() float64 { return float64(read()) })
	}
	gauge("walpost_inflight_messages", "Messages without a PubAck.",
		func() int { return current().counts().Inflight })
	gauge("walpost_inflight_bytes", "Bytes of messages without a PubAck.",
		func() int { return current().counts().InflightBytes })
	gauge("walpost_stream_shared",
		"1 where several writers share the stream, 0 where it is this relay's alone.", func() int {
			if cfg.Stream.Shared {
				return 1
			}
			return 0
		})
	gauge("walpost_held_aggregates", "Aggregates whose rows wait behind a failed one.", func() int {
		if s := current(); s != nil && cfg.OnPoison != fallback.Skip {
			return s.holds.Count()
		}
		return 0
	})
}

// counts are of the session's publisher; s is nil where no session runs.
func (s *session) counts() (c publish.Counts) {
	if s != nil {
		c = s.publisher.Counts()
	}
	return c
}

// observe keeps the gauges that cost a query, each time on a connection of its
// own: a slow one must not hold up the marks, nor cost the lock.
func observe(ctx context.Context, p *reporter, s *servers) (done chan struct{}) {
	done = make(chan struct{})
	go func() {
		defer close(done)
		for {
			if err := observeOnce(ctx, p.metrics, s); err != nil && ctx.Err() == nil {
				p.trouble("cannot read gauges", err)
			}
			if !sleep.For(ctx, 10*time.Second) {
				return
			}
		}
	}()
	return done
}

func observeOnce(ctx context.Context, m *metrics, s *servers) error {
	db, err := table.Open(ctx, s.database())
	if err != nil {
		return err
	}
	defer db.Close()
	if err := db.Limit(ctx, 2*time.Second); err != nil {
		return err
	}
	var oldest time.Duration
	var errs []error
	for _, t := range s.cfg.Outboxes {
		age, err := db.OldestPending(ctx, t)
		oldest = max(oldest, age)
		if slices.Contains(s.outboxes, t) { // else there is an alarm already
			errs = append(errs, err)
		}
	}
	if errors.Join(errs...) == nil { // an alert must not end because the table cannot be read
		m.lag.Set(oldest.Seconds())
	}
	slot, err := db.Slot(ctx)
	if err == nil {
		m.retained.Set(float64(slot.Retained))
		m.safe.Set(float64(slot.Safe))
		m.confirmedLag.Set(float64(slot.ConfirmedLag))
	}
	dead, err2 := db.DeadLetterCount(ctx, 100_000)
	if err2 == nil {
		m.dlqDepth.Set(float64(dead))
	}
	if pg.Code(err2) == pgerrcode.UndefinedTable {
		err2 = nil // no dead letter table, no dead letters
	}
	return errors.Join(append(errs, err, err2)...)
}
