// Package relay puts the parts together: the WAL (stream, decode) flows into
// JetStream (publish), and what was stored is settled in the table (fallback)
// before PostgreSQL may forget it.
//
// Three loops lie inside each other. Run connects, checks and then repeats
// tenures for ever. A tenure holds the advisory lock, which makes this relay the
// active one, and repeats sessions. A session is one START_REPLICATION and one
// lane; whatever fails in it ends it, and the next one begins by reading back
// what the stream holds. There is no other recovery.
package relay

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
	"github.com/walpost/walpost/stream"
)

// Relay delivers the outboxes of one database. Use New, then Run once.
type Relay struct {
	*reporter
	*servers

	// current is the session, for errors that come from the connection, and for gauges.
	// recoveryLSN is its recovery LSN (E).
	current     atomic.Pointer[session]
	recoveryLSN atomic.Uint64
	away        atomic.Bool  // JetStream
	stored      atomic.Int64 // PubAcks of this process

	// poison are rows that JetStream refused and that only the WAL holds (mark
	// none). It brings them again, and they become dead letters then, before
	// anything behind them is sent. Each session's goroutines have it in turn.
	poison map[outbox.Ref]*publish.RowError

	published published

	// complained is the retention's; each tenure's has it in turn.
	complained complaint

	// known is what earlier sessions of this process learnt about the stream.
	known *known
}

// known survives sessions; only the tenure's goroutine touches it.
type known struct {
	lastSeq uint64    // greatest sequence of a PubAck
	created time.Time // of the stream
	advance bool      // the last session stored or recorded something
	base    uint64    // the sequence that the last lane began behind
	laneSeq uint64    // the last lane's greatest sequence
	chained bool      // the last session ended in a chain error
	rivals  int       // consecutive sessions that another relay seems to have broken
	suspect int       // the size of the batch that one of its rows may have made fail, in the last lane
	// batchesAt is when batches are tried again that the server has refused.
	batchesAt time.Time
	conn      string // the connection to NATS that the last session began on
	// unusable is why the last session's slot has to be recreated.
	unusable   error
	unsendable unsendable
	stuck      stuck // starts that ended alike
	begun      bool  // it was asked whether this is a first start
	judged     bool  // and whether the slot that is there can be another program's
	// answered is the timeline on which the tables were answered before the WAL was read.
	answered uint32
	// compared is the stream that the last session has compared with the tables, where it
	// ended with errInsertsRead.
	compared compared
}

// New checks the configuration. It does no I/O.
func New(cfg Config, log *zap.Logger, registry prometheus.Registerer) (*Relay, error) {
	r := &Relay{servers: &servers{cfg: &cfg}, known: &known{}, poison: map[outbox.Ref]*publish.RowError{}}
	r.cfg.setDefaults()
	tables := cfg.Outboxes
	cfg.Outboxes = make([]*outbox.Table, len(tables))
	for i, t := range tables {
		own := *t // each start writes into it what the catalog says
		cfg.Outboxes[i] = &own
	}
	var err error
	if r.template, err = publish.NewTemplate(cfg.Subject); err != nil {
		return nil, err
	}
	for _, t := range cfg.Outboxes {
		if err := r.template.CheckLayout(t); err != nil {
			return nil, err
		}
		if t.Mark == outbox.MarkNone && cfg.Stream.Shared {
			return nil, hint.Errorf("give the relay a stream of its own and nats.shared: false, or choose another mark",
				"outbox %s: mark none cannot share a stream: only the position in it says what was stored", t)
		}
		if cfg.Initial == "none" && (t.Mark != outbox.MarkUpdate || !t.Layout.Records()) {
			return nil, hint.Errorf("delete the rows that shall not be published yourself, and leave postgres.initial out",
				"postgres.initial: none marks rows instead of sending them, and says so in last_error: outbox %s needs mark: update and such a column for that", t)
		}
		if !t.Shard.All() && cfg.Stream.Shared {
			return nil, hint.Errorf("give every shard a stream of its own, join them for consumers in a stream with sources, and leave nats.shared out",
				"shard %s with nats.shared: the shards have one source, and take each other's messages for their own", t.Shard)
		}
	}
	if marks := marksOf(cfg.Outboxes); marks[outbox.MarkNone] && len(marks) > 1 {
		return nil, hint.Errorf("run a relay of its own, with a slot and a stream of its own, for the outboxes with mark none",
			"mark none beside another mark: the position in the stream decides about the one, the table about the other")
	}
	if r.cfg.Mode == ModePoll {
		if err := r.cfg.mayPoll(errModePoll); err != nil {
			return nil, err
		}
	}
	r.cfg.Stream.Pattern = r.template.Pattern()
	r.reporter = newReporter(log, newMetrics(registry))
	registerSessionGauges(registry, r.cfg, r.current.Load)
	r.published.reporter, r.published.cfg = r.reporter, r.cfg
	return r, nil
}

// Run delivers until ctx is done, and then drains, confirms and returns nil. An
// error means that somebody has to put something right before it can begin, or that the
// NATS connection was closed for good: every other failure is retried, with backoff, for
// ever, and so are servers that are away at the start.
func (r *Relay) Run(parent context.Context) error {
	ctx, giveUp := context.WithCancelCause(parent)
	defer giveUp(nil)
	start := r.newStarter(giveUp)
	if err := start.begin(ctx); err != nil {
		if parent.Err() != nil {
			return nil
		}
		return err
	}
	r.known.created = start.created
	defer r.nc.Close()
	b := backoff{least: 100 * time.Millisecond, most: 5 * time.Second}
	for ctx.Err() == nil {
		r.known.advance = false
		err := r.tenure(ctx)
		if ctx.Err() != nil {
			break
		}
		r.status.set(stateWaiting, err)
		r.logFailure("the relay lost its place and begins again", err)
		if r.known.advance {
			b.reset()
		}
		b.wait(ctx)
	}
	r.metrics.standBy()
	r.status.set(stateStopped, nil)
	r.log.Info("stopped")
	if parent.Err() == nil {
		return context.Cause(ctx)
	}
	return nil
}

func (r *Relay) newStarter(giveUp func(error)) *starter {
	return &starter{reporter: r.reporter, servers: r.servers, giveUp: giveUp, deny: func(subject string) {
		if s := r.current.Load(); s != nil {
			s.lane.Deny(subject)
		}
	}}
}

// ErrRival means that another relay of the same source writes to the stream.
var ErrRival = errors.New("another relay writes to the stream")

// tenure holds the advisory lock and runs sessions until its connection is lost.
func (r *Relay) tenure(ctx context.Context) error {
	db, err := fallback.Open(ctx, r.cfg.database())
	if err != nil {
		return err
	}
	defer db.Close()
	cut := context.AfterFunc(ctx, db.Cut) // nothing is under way that is worth waiting for
	defer cut()
	if err := r.standBy(ctx, db); err != nil || ctx.Err() != nil {
		return err
	}
	if err := r.readTables(ctx, db); err != nil {
		return err
	}
	if !cut() {
		return ctx.Err()
	}
	// Another relay may have recreated the slot meanwhile, and retried what was refused.
	r.known.unusable, r.known.unsendable, r.known.compared = nil, unsendable{}, compared{}
	clear(r.poison)
	r.log.Info("active: this relay holds the lock", zap.String("slot", r.cfg.Slot))
	// Losing the connection that marks ends everything at once, even a session
	// that is draining because ctx is done.
	held, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	defer lose(nil)
	// A statement that hangs then is as good as a crash: the next read-back finds what it did.
	defer context.AfterFunc(ctx, func() {
		if sleep(held, drainTimeout) {
			db.Cut()
		}
	})()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		lose(db.Watch(held))
	}()
	defer func() { lose(nil); <-watched }()
	observed := observe(held, r.reporter, r.cfg.database(), r.cfg.Outboxes)
	defer func() { lose(nil); <-observed; r.metrics.mode.Reset() }()
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		r.watchSteps(held)
	}()
	defer func() { lose(nil); <-watching }()
	retained := r.retain(ctx, held)
	defer func() { lose(nil); <-retained }()
	return r.sessions(ctx, held, db)
}

// standBy waits for the lock. A relay that waits is ready.
func (r *Relay) standBy(ctx context.Context, db *fallback.DB) error {
	for first := true; ; first = false {
		ok, err := db.TryLock(ctx)
		if err != nil || ok {
			return err
		}
		if first {
			r.metrics.standBy()
			r.status.set(stateStandby, nil)
			r.log.Info("standing by: another relay holds the lock", zap.String("slot", r.cfg.Slot))
		}
		if !sleep(ctx, 250*time.Millisecond) {
			return nil
		}
	}
}

// sessions runs one session after the other while the lock is held: ctx is the
// process's, held ends with the lock's connection.
func (r *Relay) sessions(ctx, held context.Context, db *fallback.DB) error {
	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(held, func() { stop(context.Cause(held)) })()
	b := backoff{least: 50 * time.Millisecond, most: 5 * time.Second}
	var taken time.Time // since when the slot is somebody else's
	for {
		r.known.advance = false
		err := r.session(work, held, db)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errModeChanged) {
			continue
		}
		err = r.countUnsendable(err)
		r.noticeStuck(err)
		if !errors.Is(err, stream.ErrSlotActive) {
			r.metrics.sessions.WithLabelValues(reason(err)).Inc()
		}
		if unusable(err) && !r.cfg.bare() { // its slot is the only copy of the rows
			r.known.unusable = err
		}
		if held.Err() != nil {
			return context.Cause(held)
		}
		if !db.Alive() || errors.Is(err, ErrRival) || errors.Is(err, fallback.ErrTableChanged) {
			return err
		}
		if errors.Is(err, stream.ErrSlotActive) {
			// Its walsender may outlive a relay that was cut off, for some seconds.
			if taken.IsZero() {
				taken = time.Now()
			}
			r.standByFor(err, time.Since(taken))
			sleep(work, 250*time.Millisecond)
			continue
		}
		taken = time.Time{}
		r.status.set(stateWaiting, err)
		r.sayWhy(err)
		if r.known.advance {
			b.reset()
		}
		b.wait(work)
	}
}

// slotPatience is three times as long as the server keeps the walsender of a relay that is
// gone.
const slotPatience = 30 * time.Second

// standByFor says that the slot is somebody else's. This relay has the lock, so in the long
// run it is no relay's.
func (r *Relay) standByFor(err error, since time.Duration) {
	if since > slotPatience {
		if !r.limited("slot_in_use", 10*time.Minute) {
			r.alarm("slot_in_use", "something that is no relay streams the slot: nothing is delivered until it ends", zap.Error(err))
		}
		r.status.set(stateWaiting, err)
		return
	}
	if !r.limited("slot_active", time.Minute) {
		r.log.Info("standing by: another walsender streams the slot", zap.Error(err))
	}
	r.status.set(stateStandby, nil)
}

// sayWhy logs what ended a session, as an alarm where it does not mend itself.
func (r *Relay) sayWhy(err error) {
	r.logFailure("session ended, the next one begins with the read-back", err)
	switch {
	case r.cfg.bare() && unusable(err):
		if !r.limited("slot_unreadable", factsAgain) {
			r.alarm("slot_unreadable", "the slot cannot be read on, and with mark none only it has the events: it is kept, and nothing is delivered until an operator drops it", why(err)...)
		}
	case errors.Is(err, stream.ErrPublicationSkipped):
		r.alarm("publication_skipped", "the server left out rows because it could not load the publication: the tables deliver them", zap.Error(err))
	case errors.Is(err, errUnsendable):
		r.alarm("unsendable", "the server cannot send a row: the slot is recreated behind it, and the tables deliver", why(err)...)
	case errors.Is(err, stream.ErrUndecodable):
		r.alarm("undecodable", "the WAL holds a row that the layout does not fit: the slot is recreated behind it", zap.Error(err))
	}
}

// DefaultSource is the source where the configuration names none: unique for ever,
// and usable in a header.
func DefaultSource(systemID, database string) string {
	return fmt.Sprintf("%s/%s", systemID, url.PathEscape(database))
}
