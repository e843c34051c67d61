package relay

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// How much a session remembers of held aggregates and of moved rows. Variables for tests.
var (
	mostHeld  = fallback.MostHeld
	mostMoved = fallback.MostMoved
)

// Package fallback cannot name U, of which this is a multiple.
var _ = [1]struct{}{}[fallback.MostMoved-4*jetstream.U]

// newPoller puts the session's parts into the words of package fallback.
func (s *session) newPoller(ctx context.Context) (*fallback.Poller, error) {
	return fallback.New(ctx, fallback.Config{
		Outboxes: s.outboxes, Database: s.database(), DelayThreshold: s.cfg.DelayThreshold,
		Interval: s.cfg.FallbackInterval, Batch: s.cfg.FallbackBatch, OnPoison: s.cfg.OnPoison,
	}, fallback.Parts{
		Log: s.log, Reporter: pollerReporter{s.reporter},
		Publisher: pollerPublisher{s.publisher, s.servers.stream},
		Marker:    s.marker, Holds: s.holds, Moved: s.moved, Recovered: s.recovered,
	})
}

// pollerPublisher is the publisher, which can ask its stream for the limits.
type pollerPublisher struct {
	*publish.Publisher
	stream *jetstream.Stream
}

// Adapt implements fallback.Publisher.
func (p pollerPublisher) Adapt(ctx context.Context) error {
	info, err := p.stream.Info(ctx)
	if err == nil {
		p.Publisher.Adapt(info)
	}
	return err
}

// pollerWAL is what was received: the session knows how far, the handler which rows it still has.
type pollerWAL struct {
	session *stream.Session
	handler *walHandler
}

// AwaitReceived implements fallback.WAL.
func (w pollerWAL) AwaitReceived(ctx context.Context, lsn outbox.LSN) error {
	return w.session.AwaitReceived(ctx, lsn)
}

// Buffered implements fallback.WAL.
func (w pollerWAL) Buffered(each func(outbox.Ref)) { w.handler.eachBuffered(each) }

// Leaves implements fallback.WAL. Of a table that is not published the WAL has nothing: its rows are missed.
func (w pollerWAL) Leaves(t *outbox.Table) bool {
	as, left := w.handler.leaves(t)
	return left && as != ""
}

// Recovering implements fallback.WAL.
func (w pollerWAL) Recovering() bool {
	return w.session.Tracker().Confirmed() < w.handler.recovered.recoveryLSN
}

// pollerReporter implements fallback.Reporter. The reporter must not have these exported methods: Relay
// embeds it.
type pollerReporter struct{ *reporter }

func (p pollerReporter) Missed(rows int) { p.metrics.missed.Add(float64(rows)) }

func (p pollerReporter) Searched(t *outbox.Table, search table.Search) {
	p.metrics.searches.Inc()
	p.metrics.searchRows.Add(float64(search.Rows))
	p.metrics.searchSeconds.Add(search.Took.Seconds())
	p.log.Info("searched a whole table for pending rows", zap.Stringer("table", t),
		zap.Int64("rows", search.Rows), zap.Duration("took", search.Took))
}

func (p pollerReporter) Limited(kind string, every time.Duration) bool { return p.limited(kind, every) }

func (p pollerReporter) Meanwhile(step string, since time.Time) { p.status.meanwhile(step, since) }

func (p pollerReporter) Refused(ref outbox.Ref, eventType string, failure *outbox.RowError) {
	p.refused(ref, eventType, failure)
}

func (p pollerReporter) Alarm(a *alarm.Alarm, fields ...zap.Field) {
	p.alarm(a, fields...)
}

func (p pollerReporter) Over(kind string, a *alarm.Alarm, fields ...zap.Field) {
	p.over(kind, a, fields...)
}

func (p pollerReporter) EndsSession(err error) bool {
	return failureOf(inSearch, err).outcome == endSession
}

func (p pollerReporter) Trouble(message string, err error, fields ...zap.Field) {
	p.trouble(message, err, fields...)
}
