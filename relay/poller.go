package relay

import (
	"context"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

const (
	// pollInterval is the pause between two passes where no WAL is read, and nobody
	// announces rows.
	pollInterval = 200 * time.Millisecond
	// markPatience is how long a pass waits for the marks of what it has sent. It
	// waits so that the next one does not meet the same rows again.
	markPatience = time.Second
)

// rowMarker takes the rows that the poller does not send, see marker. Each call may wait until there is room.
type rowMarker interface {
	// stored: the row's message was read in the stream.
	stored(ctx context.Context, row table.Row, behind uint64, by waiter) error
	// park: the row has failed.
	park(ctx context.Context, row table.Row, of aggregate, by waiter) error
	// hold: the row waits behind one that has.
	hold(ctx context.Context, row table.Row, of aggregate, by waiter) error
	// busy calls each with every row that was taken and is not settled.
	busy(each func(outbox.Ref))
}

// loop delivers from the tables what the WAL does not: rows that were missed, that
// have fallen due, that are tried again, that waited behind such a row, and, where
// no WAL is read, everything. Every pass does the same: it lists what is pending,
// proves that nobody else has it in hand, sends it, and has it marked.
//
// One goroutine makes the passes: the session's work, which heals, and then run's. It owns every field of
// which nothing else is said. Any goroutine may call nudge, dueIn and eachInHand.
type poller struct {
	reporter  *reporter
	cfg       *Config
	stream    *jetstream.Stream
	db        *table.DB // its own: a long search must not hold up the marks
	publisher *publish.Publisher
	marker    rowMarker
	holds     *holds
	recovered *recoveryState
	// wal proves that the WAL brought everything up to an LSN; nil while none is
	// read. handler then is the reader's side, which has rows in hand too.
	wal interface {
		AwaitReceived(context.Context, outbox.LSN) error
	}
	handler *walHandler
	moved   *moved

	announced atomic.Bool // see listen

	wake chan struct{}
	mu   sync.Mutex
	next time.Time // of the next pass; guarded by mu

	healing     bool                        // see heal
	lookAt      map[*outbox.Table]time.Time // when recorded rows are looked for next
	again       map[*outbox.Table]bool      // the last pass over recorded rows sent some
	lockedSince map[*outbox.Table]time.Time // since when every pass has met locked rows
}

func newPoller(
	ctx context.Context, p *reporter, servers *servers,
	publisher *publish.Publisher, s rowMarker, h *holds, recovered *recoveryState,
) (*poller, error) {
	db, err := openPollerDB(ctx, servers.cfg)
	if err != nil {
		return nil, err
	}
	l := &poller{
		reporter: p, cfg: servers.cfg, stream: servers.stream, db: db,
		publisher: publisher, marker: s, holds: h, recovered: recovered,
		moved: newMoved(), wake: make(chan struct{}, 1),
		lookAt: map[*outbox.Table]time.Time{}, again: map[*outbox.Table]bool{},
		lockedSince: map[*outbox.Table]time.Time{},
	}
	return l, nil
}

func openPollerDB(ctx context.Context, cfg *Config) (*table.DB, error) {
	db, err := table.Open(ctx, cfg.database())
	if err != nil {
		return nil, err
	}
	if err := db.Unbind(ctx); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

// nudge asks for a pass now.
func (l *poller) nudge() { l.dueIn(0) }

// dueIn asks for a pass after a time.
func (l *poller) dueIn(d time.Duration) {
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

// run makes passes until ctx is done or something fails that ends the session.
func (l *poller) run(ctx context.Context) error {
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
func (l *poller) recover(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	if code := pg.Code(err); l.publisher.Err() != nil || strings.HasPrefix(code, "57P") {
		return err
	}
	l.reporter.trouble("the tables cannot be searched: trying again", err)
	l.dueIn(time.Second)
	if l.db.Alive() {
		return nil
	}
	db, err := openPollerDB(ctx, l.cfg)
	if err != nil {
		return err
	}
	l.db.Close()
	l.db = db
	return nil
}

func (l *poller) interval() time.Duration {
	if l.wal == nil && !l.announced.Load() {
		return pollInterval
	}
	return l.cfg.FallbackInterval
}

func (l *poller) sleep(ctx context.Context) {
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
func (l *poller) passes(ctx context.Context) (more bool, err error) {
	for _, t := range l.cfg.Outboxes {
		if t.Mark == outbox.MarkNone {
			continue
		}
		again, e := l.turn(ctx, t)
		more, err = more || again, errors.Join(err, e)
		if ctx.Err() != nil || l.publisher.Err() != nil {
			return false, err
		}
	}
	return more, err
}

// turn is a pass and what follows it.
func (l *poller) turn(ctx context.Context, t *outbox.Table) (more bool, err error) {
	// First: what falls due after this look is seen by the next pass, what has
	// before, by this one.
	if err := l.schedule(ctx, t); err != nil {
		return false, err
	}
	if _, full := l.moved.full(); full {
		if err := forgetSettled(ctx, l.moved, l.moved.polled, l, l.db); err != nil {
			return false, err
		}
	}
	p := &pass{blocked: map[aggregate]bool{}, recorded: map[aggregate]bool{}}
	if err := l.pass(ctx, t, p); err != nil {
		return false, err
	}
	more = p.sent && (p.full || len(p.recorded) > 0)
	if l.wal == nil || more {
		p.wait(ctx, markPatience)
	}
	if l.again[t] = len(p.recorded) > 0; p.looks {
		if err := l.endHolds(ctx, t, p); err != nil {
			return false, err
		}
	}
	l.report(ctx, t, p)
	switch {
	case more:
		l.nudge()
	case l.holds.anyQueues():
		l.dueIn(20 * time.Millisecond)
	case p.full, len(p.locked) > 0:
		l.dueIn(time.Second)
	}
	return more, nil
}

// schedule sets the clock for the next row that falls due.
func (l *poller) schedule(ctx context.Context, t *outbox.Table) error {
	wait, ok, err := l.db.NextDue(ctx, t)
	if ok {
		l.dueIn(wait)
	}
	return err
}
