// Package fallback delivers from the tables what the WAL does not: rows that it did not bring, that have
// fallen due, that are tried again, that waited behind such a row, and, where no WAL is read, every row.
//
// [Poller] makes the passes. Each one lists what is pending, proves that nothing else has those rows in
// hand, sends them, and has them marked. [Holds] keeps the later rows of an aggregate behind one that has
// failed, [Moved] knows rows of partitioned tables that the WAL may bring twice.
//
// The package knows tables only. It sees the publisher, the marker and the WAL through interfaces.
package fallback

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	// pollInterval is the pause between two passes where no WAL is read, and inserts are not
	// announced.
	pollInterval = 200 * time.Millisecond
	// markPatience is how long a pass waits for the marks of what it has sent. It
	// waits so that the next one does not meet the same rows again.
	markPatience = time.Second
	// LockedAlarm is how long a row may stay locked before its holder is named.
	LockedAlarm = 5 * time.Second
)

// OnPoison says what a failed row does to the later rows of its aggregate.
type OnPoison string

const (
	// Hold keeps them waiting until it is delivered or a dead letter.
	Hold OnPoison = "hold"
	// Skip lets them pass.
	Skip OnPoison = "skip"
)

// Config says which tables a poller searches, and how. Every field must be set.
type Config struct {
	Outboxes []*outbox.Table
	Database table.Config
	// DelayThreshold: a row whose available_at lies further than this after its commit is delayed.
	DelayThreshold time.Duration
	// Interval is the longest pause between two passes.
	Interval time.Duration
	// Batch is how many rows one statement reads.
	Batch    int
	OnPoison OnPoison
}

// Parts are what a poller works with. It does not close them.
type Parts struct {
	Log       *zap.Logger
	Reporter  Reporter
	Publisher Publisher
	Marker    Marker
	Holds     *Holds
	Moved     *Moved
	Recovered Recovered
}

// Waiter is told when a row is settled: a transaction of the WAL, or a pass of the poller.
type Waiter interface{ Settled() }

// PolledWaiter waits for a row of the table. The table says how often the row has failed.
type PolledWaiter interface {
	Waiter
	FailedAttempts() int
}

// Publisher sends rows in the order of the calls.
type Publisher interface {
	// Adapt reads the stream's limits and applies them. It fails while the stream does not answer.
	Adapt(context.Context) error
	// MostPayload is how many bytes of payload a message can have.
	MostPayload() int
	// Pass notes that rows committed up to an LSN may be sent although the WAL has not brought them.
	Pass(outbox.LSN)
	// SendPolled sends a row behind those that were sent before. A [*outbox.RowError] is the row's own;
	// after any other error nothing can be sent any more.
	SendPolled(ctx context.Context, ev *outbox.Event, by any) error
	// Flush writes what was sent.
	Flush() error
	// Err is why nothing can be sent any more, nil while it can.
	Err() error
	// Unreleased calls each with every row that was sent and is not settled.
	Unreleased(each func(outbox.Ref))
}

// Marker takes the rows that the poller does not send. Each call may wait until there is room.
type Marker interface {
	// Stored: the row's message was read in the stream, and so many others behind it.
	Stored(ctx context.Context, row table.Row, behind uint64, by Waiter) error
	// Park: the row has failed.
	Park(ctx context.Context, row table.Row, of Aggregate, by Waiter) error
	// Hold: the row waits behind one that has. The caller has counted it in its hold; Park does so itself.
	Hold(ctx context.Context, row table.Row, of Aggregate, by Waiter) error
	// Busy calls each with every row that was taken and is not settled.
	Busy(each func(outbox.Ref))
}

// Recovered knows what the recovery scan has read.
type Recovered interface {
	// StoredBefore reports whether the row's message was read although the table does not show the row
	// as stored, and how many of the relay's messages follow it.
	StoredBefore(ctx context.Context, ev *outbox.Event, recorded bool) (n uint64, stored bool, err error)
}

// WAL is what a session reads beside the poller.
type WAL interface {
	// AwaitReceived returns when everything up to the LSN has been received.
	AwaitReceived(context.Context, outbox.LSN) error
	// Buffered calls each with every row that was received and is neither sent nor handed to the marker.
	Buffered(each func(outbox.Ref))
	// Leaves reports whether the rows of a table are left to the passes, although the WAL has them.
	Leaves(t *outbox.Table) bool
	// Recovering reports whether a row that an earlier session may have had in hand is not settled yet.
	Recovering() bool
}

// Reporter tells an operator what the poller finds.
type Reporter interface {
	Alarm(a *alarm.Alarm, fields ...zap.Field)
	// Over logs that an alarm is over, if Limited has counted it as said under the kind.
	Over(kind string, a *alarm.Alarm, fields ...zap.Field)
	// Trouble logs a failure that is retried, now and then.
	Trouble(message string, err error, fields ...zap.Field)
	// Limited reports whether something of the kind was said less than the time ago; if not, it counts as
	// said now.
	Limited(kind string, every time.Duration) bool
	// EndsSession reports whether a failed search ends the session. It is repeated otherwise.
	EndsSession(err error) bool
	// Missed counts rows that the WAL did not bring.
	Missed(rows int)
	// Searched counts searches of a whole table.
	Searched(t *outbox.Table, search table.Search)
	// Refused counts a row that cannot be delivered for a reason in the row itself.
	Refused(ref outbox.Ref, eventType string, failure *outbox.RowError)
	// Meanwhile shows what has gone on since then while the tables are polled.
	Meanwhile(step string, since time.Time)
}

// Poller makes passes over the tables. One goroutine makes them: the session's work, which heals, and then
// Run's. It owns every field of which nothing else is said. cfg, the parts and wal do not change once Run has
// begun. Any goroutine may call Nudge and DueIn at any time, and InHand, Answer and Listen after Beside.
type Poller struct {
	cfg       Config
	log       *zap.Logger
	reporter  Reporter
	publisher Publisher
	marker    Marker
	holds     *Holds
	moved     *Moved
	recovered Recovered
	db        *table.DB // its own: a long search must not hold up the marks
	// wal is nil while no WAL is read.
	wal WAL

	announced atomic.Bool // see Listen

	wake chan struct{}
	mu   sync.Mutex
	next time.Time // of the next pass; guarded by mu

	healing      bool                        // see Heal
	lost         bool                        // the stream has lost rows
	lookAt       map[*outbox.Table]time.Time // when recorded rows are looked for next
	again        map[*outbox.Table]bool      // the last pass sent recorded rows
	lockedSince  map[*outbox.Table]time.Time // since when every pass has met locked rows
	blockedSince map[string]time.Time        // since when a step meets a lock: see reportLock
	advances     map[*outbox.Table]*advance
}

// New opens the poller's connection. Close closes it.
func New(ctx context.Context, cfg Config, parts Parts) (*Poller, error) {
	db, err := open(ctx, cfg.Database)
	if err != nil {
		return nil, err
	}
	advances := map[*outbox.Table]*advance{}
	for _, t := range cfg.Outboxes {
		advances[t] = &advance{}
	}
	return &Poller{
		cfg: cfg, log: parts.Log, reporter: parts.Reporter, publisher: parts.Publisher, marker: parts.Marker,
		holds: parts.Holds, moved: parts.Moved, recovered: parts.Recovered, db: db,
		wake:   make(chan struct{}, 1),
		lookAt: map[*outbox.Table]time.Time{}, again: map[*outbox.Table]bool{},
		lockedSince: map[*outbox.Table]time.Time{}, blockedSince: map[string]time.Time{},
		advances: advances,
	}, nil
}

func open(ctx context.Context, cfg table.Config) (*table.DB, error) {
	db, err := table.Open(ctx, cfg)
	if err != nil {
		return nil, err
	}
	if err := db.Unbind(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

// Close closes the connection. No pass may be under way.
func (l *Poller) Close() { l.db.Close() }

// Beside has the poller work beside a reader of the WAL from now on. It must be called before Run.
func (l *Poller) Beside(wal WAL) { l.wal = wal }

// Nudge asks for a pass now.
func (l *Poller) Nudge() { l.DueIn(0) }

// DueIn asks for a pass after a time.
func (l *Poller) DueIn(d time.Duration) {
	at := time.Now().Add(d)
	l.mu.Lock()
	sooner := at.Before(l.next)
	if sooner {
		l.next = at
	}
	l.mu.Unlock()
	if sooner {
		select {
		case l.wake <- struct{}{}:
		default:
		}
	}
}

// Run makes passes until ctx is done, and then returns nil, or until something fails that ends the session.
func (l *Poller) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		l.mu.Lock()
		l.next = time.Now().Add(l.interval())
		l.mu.Unlock()
		if _, err := l.passes(ctx); err != nil {
			if err := l.recover(ctx, err); err != nil {
				return err
			}
		}
		l.sleep(ctx)
	}
	return nil
}

// recover returns what ends the session. A search that failed or took too long does
// not.
func (l *Poller) recover(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	if l.publisher.Err() != nil || l.reporter.EndsSession(err) {
		return err
	}
	l.reporter.Trouble("the tables cannot be searched: trying again", err)
	l.DueIn(time.Second)
	if l.db.Alive() {
		return nil
	}
	db, err := open(ctx, l.cfg.Database)
	if ctx.Err() != nil && err != nil {
		return nil
	}
	if err != nil {
		return err
	}
	l.db.Close()
	l.db = db
	return nil
}

// leads reports whether only the passes deliver a table's rows.
func (l *Poller) leads(t *outbox.Table) bool { return l.wal == nil || l.wal.Leaves(t) }

func (l *Poller) interval() time.Duration {
	if l.wal == nil && !l.announced.Load() {
		return pollInterval
	}
	return l.cfg.Interval
}

func (l *Poller) sleep(ctx context.Context) {
	for {
		l.mu.Lock()
		wait := time.Until(l.next)
		l.mu.Unlock()
		if wait <= 0 {
			return
		}
		t := time.NewTimer(wait)
		select {
		case <-t.C:
		case <-l.wake:
		case <-ctx.Done():
			t.Stop()
			return
		}
		t.Stop()
	}
}

// passes makes a pass over each table. It reports whether there is more that can be
// sent now. A table that cannot be searched keeps no other one waiting.
func (l *Poller) passes(ctx context.Context) (more bool, err error) {
	for _, t := range l.cfg.Outboxes {
		again, e := l.turn(ctx, t)
		l.reportLock(ctx, t, "search_locked", "the search of the table, and what the WAL does not bring", e)
		more, err = more || again, errors.Join(err, e)
		if ctx.Err() != nil || l.publisher.Err() != nil {
			return false, err
		}
	}
	return more, err
}

// reportLock raises an alarm where a step that works on a table has waited for a lock in vain for long. An
// error of another kind says nothing of locks.
func (l *Poller) reportLock(ctx context.Context, t *outbox.Table, step, waits string, err error) {
	kind := step + "/" + t.String() + "/" // Over takes all that begin so
	switch since := l.blockedSince[kind]; {
	case err == nil:
		delete(l.blockedSince, kind)
		l.reporter.Over(kind, alarm.RowLocked, zap.String("table", t.String()))
	case !table.IsLocked(err):
	case since.IsZero():
		l.blockedSince[kind] = time.Now()
	case time.Since(since) >= LockedAlarm && !l.reporter.Limited(kind, 30*time.Second):
		who, e := l.db.TableBlocker(ctx, t)
		if e != nil {
			who = e.Error()
		}
		l.reporter.Alarm(alarm.RowLocked,
			zap.String("waiting", waits), zap.String("table", t.String()), zap.String("holder", who))
	}
}

// turn is a pass and what follows it.
func (l *Poller) turn(ctx context.Context, t *outbox.Table) (more bool, err error) {
	// First: what falls due after this look is seen by the next pass, what has
	// before, by this one.
	if err := l.schedule(ctx, t); err != nil {
		return false, err
	}
	if err := l.moved.forgetPolled(ctx, l.InHand(), l.db); err != nil {
		return false, err
	}
	p := &pass{
		blocked: map[Aggregate]bool{}, failed: map[Aggregate]bool{}, recorded: map[Aggregate]bool{},
	}
	if err := l.pass(ctx, t, p); err != nil {
		return false, err
	}
	more = p.sent && (p.full || len(p.recorded) > 0)
	if l.wal == nil || more {
		p.wait(ctx, markPatience)
	}
	l.again[t] = len(p.recorded) > 0
	if p.looks {
		if err := l.endHolds(ctx, t, p); err != nil {
			return false, err
		}
	}
	l.report(ctx, t, p)
	if err := l.advance(ctx, t); err != nil {
		return false, err
	}
	switch {
	case more:
		l.Nudge()
	case l.holds.anyQueues():
		l.DueIn(20 * time.Millisecond)
	case p.full, len(p.locked) > 0:
		l.DueIn(time.Second)
	}
	return more, nil
}

// advancePause is the least time between two steps of a table's progress.
const advancePause = time.Second

// advance is the next step of a table's progress.
type advance struct {
	table.Advance
	at time.Time
}

// advance has later passes begin their search where all earlier rows are settled, with mark journal.
func (l *Poller) advance(ctx context.Context, t *outbox.Table) error {
	a := l.advances[t]
	if time.Since(a.at) < advancePause {
		return nil
	}
	a.at = time.Now()
	err := l.db.Search(ctx, func(ctx context.Context) error { return l.db.Advance(ctx, t, &a.Advance) })
	if err == nil && a.Whole != nil {
		l.reporter.Searched(t, *a.Whole)
	}
	l.reportLock(ctx, t, "progress_locked", "the journal's progress; searches take longer", err)
	if table.IsLocked(err) {
		l.reporter.Trouble("the journal's progress does not move: trying again", err)
		return nil
	}
	return err
}

// schedule sets the clock for the next row that falls due.
func (l *Poller) schedule(ctx context.Context, t *outbox.Table) error {
	var wait time.Duration
	var ok bool
	err := l.db.Search(ctx, func(ctx context.Context) (err error) {
		wait, ok, err = l.db.NextDue(ctx, t)
		return err
	})
	if ok {
		l.DueIn(wait)
	}
	return err
}
