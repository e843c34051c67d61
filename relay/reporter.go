package relay

import (
	"context"
	"maps"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// reporter says what the relay does and finds: in its status, its metrics, its alarms and its log. Every
// goroutine of the relay calls it, and it calls none of the relay's other parts.
//
// log and metrics are set once. They and status guard themselves.
type reporter struct {
	log     *zap.Logger
	metrics *metrics
	status  status
	once    *once // nil without Config.Once

	mu         sync.Mutex          // guards what follows
	said       map[string]*saying  // by its kind
	eventTypes map[string]struct{} // label values in use
}

// saying is a line of a kind that is not said each time.
type saying struct {
	at      time.Time     // of the last one
	every   time.Duration // is said again only after this time
	leftOut int           // since then
	named   bool          // each names another row: see leftOut
}

func newReporter(log *zap.Logger, m *metrics) *reporter {
	return &reporter{log: log, metrics: m, said: map[string]*saying{}, eventTypes: map[string]struct{}{}}
}

// failing notes what keeps the present step from being done, nil where nothing does.
func (p *reporter) failing(err error) {
	p.status.failing(err)
	p.once.failed(err)
}

// waiting notes why nothing is delivered for now.
func (p *reporter) waiting(err error) {
	p.status.set(stateWaiting, err)
	p.once.failed(err)
}

// alarm is something that an operator must know of, whatever happens next.
func (p *reporter) alarm(a *alarm.Alarm, fields ...zap.Field) {
	p.metrics.alarms.WithLabelValues(a.Name()).Inc()
	p.log.Error(a.Meaning(), append(fields, zap.String("alarm", a.Name()))...)
}

// ended logs that the cause of an alarm is gone.
func (p *reporter) ended(a *alarm.Alarm, fields ...zap.Field) {
	p.log.Info(a.Over(), append(fields, zap.String("alarm_over", a.Name()))...)
}

// over calls ended if limited knows a kind with this prefix. The next one of the kind is raised at once.
func (p *reporter) over(kinds string, a *alarm.Alarm, fields ...zap.Field) {
	p.mu.Lock()
	before := len(p.said)
	maps.DeleteFunc(p.said, func(kind string, _ *saying) bool { return strings.HasPrefix(kind, kinds) })
	raised := len(p.said) < before
	p.mu.Unlock()
	if raised {
		p.ended(a, fields...)
	}
}

// trouble logs a failure that is retried, at most once in ten seconds.
func (p *reporter) trouble(message string, err error, fields ...zap.Field) {
	if !p.limited(message, 10*time.Second) {
		p.log.Warn(message, append(fields, why(err)...)...)
	}
}

// limited reports whether something of the kind was said less than the given
// time ago; if not, it counts as said now. Kinds are few.
func (p *reporter) limited(kind string, every time.Duration) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.said[kind]
	if s != nil && time.Since(s.at) < every {
		s.leftOut++
		return true
	}
	if s == nil {
		s = &saying{}
		p.said[kind] = s
	}
	s.at, s.every = time.Now(), every
	return false
}

// leftOut is a field of a line that names one of many rows: how many lines of the kind limited has kept
// back since the last one. Where no line follows, sayLeftOut says so.
func (p *reporter) leftOut(kind string) zap.Field {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.said[kind]
	if s == nil {
		return zap.Skip()
	}
	n := s.leftOut
	if s.leftOut, s.named = 0, true; n == 0 {
		return zap.Skip()
	}
	return zap.Int("left_out", n)
}

// sayLeftOut says how many lines were kept back that name rows, where no other line has said so in time. With
// end it does not wait for that.
func (p *reporter) sayLeftOut(end bool) {
	p.mu.Lock()
	left := map[string]int{}
	for kind, s := range p.said {
		if s.named && s.leftOut > 0 && (end || time.Since(s.at) >= s.every) {
			left[kind], s.leftOut = s.leftOut, 0
		}
	}
	p.mu.Unlock()
	for kind, n := range left {
		p.log.Warn("rows were left out of the log", zap.String("kind", kind), zap.Int("left_out", n))
	}
}

// logFailure says once what ended something, with the advice where there is one.
func (p *reporter) logFailure(message string, err error) {
	p.log.Warn(message, append(why(err), zap.String("reason", failureOf(atSessionEnd, err).reason))...)
}

// maxEventTypes bounds the label values: rows are hostile.
const maxEventTypes = 200

// refused counts a row that cannot be delivered for a reason in the row itself. It
// logs the first of its kind, and then one in ten seconds.
func (p *reporter) refused(ref outbox.Ref, eventType string, failure *outbox.RowError) {
	name := p.eventTypeLabel(eventType, failure.Class)
	p.metrics.failures.WithLabelValues(name, failure.Class).Inc()
	kind := "refused/" + name + "/" + failure.Class
	if p.limited(kind, 10*time.Second) {
		return
	}
	p.log.Warn("a row cannot be delivered: its failure is recorded", zap.Stringer("row", ref),
		zap.String("event_type", eventType),
		zap.String("class", failure.Class), zap.String("failure", failure.Reason), p.leftOut(kind))
}

// deadLetter logs a row that has become a dead letter, and then one in ten seconds.
func (p *reporter) deadLetter(ref outbox.Ref, failure string) {
	if !p.limited("dead_letter", 10*time.Second) {
		p.log.Warn("a row has become a dead letter: see `walpost dlq list`", zap.Stringer("row", ref),
			zap.String("failure", failure), p.leftOut("dead_letter"))
	}
}

func (p *reporter) eventTypeLabel(name, class string) string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.eventTypes) < maxEventTypes && len(name) <= 100 && class != outbox.RowSubject {
		p.eventTypes[name] = struct{}{}
	}
	if _, ok := p.eventTypes[name]; !ok {
		return "other"
	}
	return name
}

// sayInserted raises the alarm once an hour for each table.
func (p *reporter) sayInserted(t *outbox.Table, more ...zap.Field) {
	if !p.limited("inserted_marked/"+t.String(), time.Hour) {
		p.alarm(alarm.InsertedMarked, append(more, zapTable(t))...)
	}
}

// alarmLocked names who has a lock that statements over the row's table wait for, every 30 seconds. waits is
// what waits for it.
func (p *reporter) alarmLocked(ctx context.Context, db *table.DB, ref outbox.Ref, waits string) {
	if p.limited(lockedKind(ref.Table), 30*time.Second) {
		return
	}
	who, err := db.TableBlocker(ctx, ref.Table)
	if err != nil {
		who = err.Error()
	}
	p.alarm(alarm.RowLocked,
		zap.String("waiting", waits), zap.Stringer("row", ref), zap.String("holder", who))
}

func lockedKind(t *outbox.Table) string { return "table_locked/" + t.String() + "/" }

// alarmNoConsumer: the limit may be the account's, which nothing else tells. nil ends the alarm.
func (p *reporter) alarmNoConsumer(err error) {
	if err == nil {
		p.over("no_consumer", alarm.NoConsumer)
		return
	}
	if !p.limited("no_consumer", time.Hour) {
		p.alarm(alarm.NoConsumer, zap.Error(err),
			zap.String("hint", "raise max_consumers, or remove a consumer"))
	}
}

// alarmForged: the message at the sequence is not the row's own.
func (p *reporter) alarmForged(ref outbox.Ref, seq uint64) {
	if kind := "forged_message/" + ref.Table.String(); !p.limited(kind, time.Second) {
		p.alarm(alarm.ForgedMessage, zap.Stringer("row", ref), zap.Uint64("sequence", seq), p.leftOut(kind))
	}
}

// sayWeaknesses logs what is no reason to refuse the stream.
func (p *reporter) sayWeaknesses(findings check.Findings) {
	for _, f := range findings {
		if f.Level != check.Error && !p.limited(f.Code, time.Hour) {
			p.log.Warn(f.Text, zap.String("code", f.Code), zap.String("fix", f.Fix))
		}
	}
}

// slowStep is how long a step may take before the log says so.
const slowStep = time.Minute

// watchSteps says, once a minute, where a session hangs, and what the log has left out.
func (p *reporter) watchSteps(ctx context.Context) {
	defer p.sayLeftOut(true)
	for sleep.For(ctx, slowStep/4) {
		p.sayLeftOut(false)
		p.status.mu.Lock()
		step, took := p.status.step, time.Since(p.status.stepAt)
		err, polling := p.status.err, p.status.state == statePolling
		p.status.mu.Unlock()
		if step == "" || took <= slowStep || p.limited("slow_step", slowStep) {
			continue
		}
		message := "a step between two times of delivering takes long, and new rows wait"
		if polling {
			message = "making the slot takes long: the tables are polled meanwhile"
		}
		p.log.Warn(message, zap.String("step", step), zap.Duration("for", took.Round(time.Second)),
			zap.Error(err))
	}
}

// why is an error as a log has it, with the advice where there is one.
func why(err error) []zap.Field {
	fields := []zap.Field{zap.Error(err)}
	if h := hint.Of(err); h != "" {
		fields = append(fields, zap.String("hint", h))
	}
	return fields
}

func zapTable(t *outbox.Table) zap.Field { return zap.String("table", t.String()) }
