package fallback

import (
	"context"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/crash"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

const (
	// passRows bounds what one pass looks at, in rows of a table.
	passRows = 16_384
	// recordedPause is the least time between two looks at recorded rows, and
	// recordedShare the part of the time that goes into them at most: they may be
	// many, while passes for rows that fall due follow each other closely.
	recordedPause = 100 * time.Millisecond
	recordedShare = 10
)

// pass counts what one pass has sent and is not settled.
type pass struct {
	mu      sync.Mutex
	pending int
	done    chan struct{} // closed when wait is over

	looks    bool // at recorded rows, too
	full     bool // there is more than it looked at
	sent     bool // something
	locked   []outbox.Ref
	blocked  map[Aggregate]bool // later rows wait: an earlier one is locked, early, being recorded or failed
	failed   map[Aggregate]bool // later recorded rows wait: an earlier recorded one has failed again
	recorded map[Aggregate]bool // recorded rows of these were sent
	missed   []string
	moved    uint64 // Moved.now, read before what is in hand
}

// fail notes that a row has failed. Later rows of its aggregate wait for the next pass. If the row was
// recorded before, only recorded rows wait, and the others are recorded as held: such a row may be due in
// every pass.
func (p *pass) fail(of Aggregate, recorded bool) {
	if recorded {
		p.failed[of] = true
	} else {
		p.blocked[of] = true
	}
}

// waits reports whether a row of the aggregate is left to a later pass.
func (p *pass) waits(of Aggregate, recorded bool) bool {
	return p.blocked[of] || recorded && p.failed[of]
}

func (p *pass) add() {
	p.mu.Lock()
	p.pending++
	p.mu.Unlock()
}

// Settled implements Waiter.
func (p *pass) Settled() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pending--; p.pending == 0 && p.done != nil {
		close(p.done)
		p.done = nil
	}
}

// wait returns when everything is settled, or patience is over.
func (p *pass) wait(ctx context.Context, patience time.Duration) {
	p.mu.Lock()
	if p.pending == 0 {
		p.mu.Unlock()
		return
	}
	done := make(chan struct{})
	p.done = done
	p.mu.Unlock()
	t := time.NewTimer(patience)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	case <-ctx.Done():
	}
}

// pass is one round over a table.
func (l *Poller) pass(ctx context.Context, t *outbox.Table, p *pass) error {
	var recorded []table.Candidate
	var overtaken map[outbox.AggregateKey]bool
	var err error
	if p.looks = l.looks(t); p.looks {
		begun := time.Now()
		err = l.db.Search(ctx, func(ctx context.Context) (err error) {
			recorded, overtaken, err = l.recorded(ctx, t)
			return err
		})
		l.lookAt[t] = time.Now().Add(max(recordedPause, recordedShare*time.Since(begun)))
		if err != nil {
			return err
		}
	}
	var fresh []table.Candidate
	if !l.healing || l.heals(t) {
		err = l.db.Search(ctx, func(ctx context.Context) (err error) {
			fresh, err = l.db.Fresh(ctx, t, l.cfg.DelayThreshold, passRows)
			return err
		})
	}
	if err != nil || len(recorded)+len(fresh) == 0 {
		return err
	}
	crash.At("listed")
	p.full = len(recorded) == passRows || len(fresh) == passRows
	if err := l.prove(ctx); err != nil {
		return err
	}
	for _, c := range recorded {
		l.holds.open(Aggregate{t, c.Aggregate})
	}
	recorded = slices.DeleteFunc(recorded, func(c table.Candidate) bool { return overtaken[c.Aggregate] })
	if len(recorded) > 0 { // the cause of a failure may be gone
		if l.publisher.Adapt(ctx) != nil { // while nothing can be sent, a failure says nothing
			recorded = nil
			l.DueIn(time.Second)
		}
	}
	p.moved = l.moved.now()
	inHand, seen, behind := l.InHand().of(t), map[string]bool{}, map[Aggregate]bool{}
	free := func(cs []table.Candidate) []table.Candidate {
		return slices.DeleteFunc(cs, func(c table.Candidate) bool {
			of := Aggregate{t, c.Aggregate}
			// Where ids are not unique, the next pass brings another row with this one.
			if seen[c.ID] || behind[of] {
				behind[of] = of.Ordered()
				return true
			}
			seen[c.ID] = true
			sent, taken := inHand[c.ID]
			if taken && !sent && c.Recorded {
				l.DueIn(recordedPause)
				if of.Ordered() && l.cfg.OnPoison != Skip {
					p.blocked[of] = true // it is being recorded again: the later ones wait for that
				}
			}
			return taken
		})
	}
	for _, cs := range [][]table.Candidate{free(recorded), free(fresh)} {
		for most := l.cfg.Batch; len(cs) > 0; {
			some := cs[:batch(cs, most)]
			n, err := l.deliver(ctx, t, p, some)
			if err != nil {
				return err
			}
			if n < len(some) { // the rows are larger than they are stored: the rest is read again
				most = n
			} else {
				most = min(2*most, l.cfg.Batch)
			}
			cs = cs[n:]
		}
	}
	return nil
}

// recorded lists the recorded rows that may be tried now. A session may have recorded a row while earlier
// ones of its aggregate were in its publisher, and have ended before these were stored. Those come first, and
// their aggregates are overtaken: where only the passes deliver, at any time, and else until the WAL has
// brought what such a session had. Fresh ones are held as soon as they are met.
func (l *Poller) recorded(
	ctx context.Context, t *outbox.Table,
) (cs []table.Candidate, overtaken map[outbox.AggregateKey]bool, err error) {
	hold := l.cfg.OnPoison != Skip
	// Asked before the rows are listed: if it is over, the list has everything that was recorded till then.
	mayBeOvertaken := hold && (l.leads(t) || l.wal.Recovering())
	cs, err = l.db.Recorded(ctx, t, hold, passRows)
	if err != nil || len(cs) == 0 || !mayBeOvertaken {
		return cs, nil, err
	}
	among := map[outbox.AggregateKey]bool{}
	for _, c := range cs {
		among[c.Aggregate] = true
	}
	if overtaken, err = l.db.Overtaken(ctx, t, l.cfg.DelayThreshold, among); err != nil {
		return nil, nil, err
	}
	// Once more: what was recorded between the two would be in neither. Nor was it
	// asked whether another aggregate is overtaken.
	cs, err = l.db.Recorded(ctx, t, hold, passRows)
	return slices.DeleteFunc(cs, func(c table.Candidate) bool { return !among[c.Aggregate] }), overtaken, err
}

// looks reports whether it is time to look at recorded rows.
func (l *Poller) looks(t *outbox.Table) bool {
	rest := time.Until(l.lookAt[t])
	if rest > 0 && !l.healing && !l.again[t] && !l.holds.anyQueues() {
		l.DueIn(rest)
		return false
	}
	return true
}

// prove waits until everything that was committed when it is called is flushed, so
// that no crash can take it back, and has been received from the WAL, and tells the
// publisher how far that is. What is then not in hand and still pending, nobody else will
// send.
func (l *Poller) prove(ctx context.Context) error {
	lsn, err := l.db.InsertLSN(ctx)
	if err != nil {
		return err
	}
	if err := l.db.Flush(ctx); err != nil {
		return err
	}
	if l.wal != nil {
		if err := l.wal.AwaitReceived(ctx, lsn); err != nil {
			return err
		}
	}
	crash.At("proven")
	l.publisher.Pass(lsn)
	return nil
}

// report says what a pass has found.
func (l *Poller) report(ctx context.Context, t *outbox.Table, p *pass) {
	if n := len(p.missed); n > 0 {
		l.reporter.Missed(n)
		if !l.reporter.Limited("missed", 10*time.Second) {
			l.reporter.Alarm(alarm.MissedRows, zap.String("table", t.String()), zap.Int("rows", n),
				zap.String("first_id", p.missed[0]), zap.String("last_id", p.missed[n-1]))
		}
	}
	kind := "pending_locked/" + t.String() + "/" // Over takes all that begin so
	if len(p.locked) == 0 {
		if _, were := l.lockedSince[t]; were {
			l.reporter.Over(kind, alarm.RowLocked,
				zap.String("table", t.String()))
		}
		delete(l.lockedSince, t)
		return
	}
	if l.lockedSince[t].IsZero() {
		l.lockedSince[t] = time.Now()
	}
	if time.Since(l.lockedSince[t]) < LockedAlarm || l.reporter.Limited(kind, 30*time.Second) {
		return
	}
	ref := p.locked[0]
	who, err := l.db.Blocker(ctx, t, ref.ID)
	if err != nil {
		who = err.Error()
	}
	l.reporter.Alarm(alarm.RowLocked,
		zap.String("waiting", "a pending row, and the later rows of its aggregate"),
		zap.String("row", t.String()+"/"+ref.ID), zap.String("holder", who))
}
