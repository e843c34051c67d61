package relay

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
)

// ErrRival means that another relay of the same source writes to the stream.
var ErrRival = errors.New("another relay writes to the stream")

// leader stands by for the advisory lock and holds it for a term, in which it has one session after the
// other.
// Run's goroutine owns it and its history.
type leader struct {
	*reporter
	*servers
	slots     *slotKeeper
	retention *retainer
	past      *history
	// current is set by each session: see Relay.
	current *atomic.Pointer[session]
}

func newLeader(p *reporter, servers *servers, current *atomic.Pointer[session]) *leader {
	return &leader{
		reporter: p, servers: servers, slots: &slotKeeper{p, servers},
		retention: &retainer{reporter: p, servers: servers},
		past: &history{
			published:    published{reporter: p, servers: servers},
			unreplayable: map[replayedRow]error{},
		},
		current: current,
	}
}

// run has one term after the other until ctx is done.
func (l *leader) run(ctx context.Context) {
	b := backoff{least: 100 * time.Millisecond, most: 5 * time.Second}
	for ctx.Err() == nil {
		l.past.advance = false
		err := l.term(ctx)
		if ctx.Err() != nil {
			break
		}
		if l.past.advance {
			b.reset()
			l.once.advanced()
		}
		l.waiting(err)
		l.logFailure("the relay lost its place and begins again", err)
		b.wait(ctx)
	}
}

// term holds the advisory lock and runs sessions until its connection is lost.
func (l *leader) term(ctx context.Context) error {
	one := pg.NewOneServer()
	l.one.Store(one)
	db, err := table.Open(ctx, l.database())
	if err != nil {
		return err
	}
	defer db.Close()
	cut := context.AfterFunc(ctx, db.Cut) // nothing is under way that is worth waiting for
	defer cut()
	l.status.setAside(nil)
	if err := l.standBy(ctx, db); err != nil || ctx.Err() != nil {
		return err
	}
	if err := l.readTables(ctx, db); err != nil {
		return err
	}
	if !cut() {
		return ctx.Err()
	}
	// Another relay may have recreated the slot meanwhile, and retried what was refused.
	l.past.unusable, l.past.unsendable, l.past.compared = nil, unsendable{}, compared{}
	l.log.Info("active: this relay holds the lock", zap.String("slot", l.cfg.Slot))
	// Losing the connection that marks ends everything at once, even a session
	// that is draining because ctx is done.
	held, lose := context.WithCancelCause(context.WithoutCancel(ctx))
	defer lose(nil)
	// A statement that hangs then is as good as a crash: the next recovery scan finds what it did.
	defer context.AfterFunc(ctx, func() {
		if sleep.For(held, drainTimeout) {
			db.Cut()
		}
	})()
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		lose(db.Watch(held))
	}()
	go func() {
		select {
		case other := <-one.Other():
			l.alarm(alarm.AnotherServer, zap.Error(other))
			lose(other)
		case <-held.Done():
		}
	}()
	defer func() { lose(nil); <-watched }()
	observed := observe(held, l.reporter, l.servers)
	defer func() { lose(nil); <-observed; l.metrics.mode.Reset(); l.metrics.postgres.Reset() }()
	met := one.Met()
	l.metrics.postgres.WithLabelValues(
		met.Address, strconv.Itoa(int(met.Timeline)), met.Started.Format(time.RFC3339Nano)).Set(1)
	watching := make(chan struct{})
	go func() {
		defer close(watching)
		l.watchSteps(held)
	}()
	defer func() { lose(nil); <-watching }()
	retained := l.retention.start(ctx, held)
	defer func() { lose(nil); <-retained }()
	return l.sessions(ctx, held, db)
}

// standBy waits for the lock. A relay that waits is ready.
func (l *leader) standBy(ctx context.Context, db *table.DB) error {
	begun := time.Now()
	var looked time.Time
	for first := true; ; first = false {
		ok, err := db.TryLock(ctx)
		if ok {
			l.endSlotShared()
		}
		if err != nil || ok {
			return err
		}
		if l.cfg.Once {
			if time.Since(begun) > lockPatience {
				l.once.end(l.lockedError(ctx, db))
			}
		} else if first {
			l.metrics.standBy()
			l.status.set(stateStandby, nil)
			l.log.Info("standing by: another relay holds the lock", zap.String("slot", l.cfg.Slot))
		}
		if !sleep.For(ctx, 250*time.Millisecond) {
			return nil
		}
		// TryLock follows at once: DB.StandingBy looks for it as the last statement.
		if !l.cfg.Once && time.Since(looked) >= factsEvery {
			if err := l.compareHolder(ctx, db); err != nil {
				return err
			}
			looked = time.Now()
		}
	}
}

// sessions runs one session after the other while the lock is held: ctx is the
// process's, held ends with the lock's connection.
func (l *leader) sessions(ctx, held context.Context, db *table.DB) error {
	work, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(held, func() { stop(context.Cause(held)) })()
	b := backoff{least: 50 * time.Millisecond, most: 5 * time.Second}
	var waits string // the reason to stand by with the lock, since then
	var since time.Time
	for {
		l.past.advance = false
		l.status.beginSession()
		err := l.session(work, held, db)
		if ctx.Err() != nil {
			l.status.endSession(errStopped)
			return nil
		}
		if errors.Is(err, errModeChanged) {
			l.status.endSession(err)
			continue
		}
		err = l.countUnsendable(err)
		f := failureOf(atSessionEnd, err)
		l.status.endSession(err)
		if l.past.displaced++; !l.past.chained || l.past.advance {
			l.past.displaced = 0
		}
		l.noticeStuck(err, f)
		if f.outcome != standBy {
			l.metrics.sessions.WithLabelValues(f.reason).Inc()
		}
		if f.outcome == recreateSlot {
			l.past.unusable = err
		}
		if held.Err() != nil {
			return context.Cause(held)
		}
		if !db.Alive() || f.outcome == endTerm {
			return err
		}
		if f.outcome == standBy {
			if f.reason != waits {
				waits, since = f.reason, time.Now()
			}
			l.standByFor(err, time.Since(since))
			l.once.failed(err)
			sleep.For(work, 250*time.Millisecond)
			continue
		}
		waits = ""
		if l.past.advance {
			b.reset()
			l.once.advanced()
		}
		l.waiting(err)
		l.sayWhy(err, f)
		b.wait(work)
	}
}

// slotPatience is three times as long as the server keeps the walsender of a relay that is
// gone.
const slotPatience = 30 * time.Second

// standByFor says that the slot is somebody else's, or the rows are. This relay has the lock, so in the long
// run the slot is no relay's: the walsender of one that was cut off outlives it for some seconds.
func (l *leader) standByFor(err error, since time.Duration) {
	if errors.Is(err, errSharedRows) {
		l.awaitDeliverer(err, since)
		return
	}
	if since > slotPatience {
		if !l.limited("slot_in_use", 10*time.Minute) {
			l.alarm(alarm.SlotInUse, zap.Error(err))
		}
		l.status.set(stateWaiting, err)
		return
	}
	if !l.limited("slot_active", time.Minute) {
		l.log.Info("standing by: another walsender streams the slot", zap.Error(err))
	}
	l.status.set(stateStandby, nil)
}

// sayWhy logs what ended a session, as an alarm where it does not mend itself.
func (l *leader) sayWhy(err error, f failure) {
	l.logFailure("session ended, the next one begins with the read-back", err)
	if f.outcome == recreateSlot && f.alarm != nil {
		l.alarm(f.alarm, why(err)...)
	}
}
