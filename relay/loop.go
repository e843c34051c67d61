package relay

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

const (
	// passRows bounds what one pass looks at, in rows of a table.
	passRows = publish.U
	// pollInterval is the pause between two passes where no WAL is read, and nobody
	// announces rows.
	pollInterval = 200 * time.Millisecond
	// markPatience is how long a pass waits for the marks of what it has sent. It
	// waits so that the next one does not meet the same rows again.
	markPatience = time.Second
	// recordedPause is the least time between two looks at recorded rows, and
	// recordedShare the part of the time that goes into them at most: they may be
	// many, while passes for rows that fall due follow each other closely.
	recordedPause = 100 * time.Millisecond
	recordedShare = 10
	// batchBytes bounds the payloads that are read at once, as the table keeps them.
	batchBytes = 1 << 20
)

// loop delivers from the tables what the WAL does not: rows that were missed, that
// have fallen due, that are tried again, that waited behind such a row, and, where
// no WAL is read, everything. Every pass does the same: it lists what is pending,
// proves that nobody else has it in hand, sends it, and has it marked.
type loop struct {
	r       *Relay
	db      *fallback.DB // its own: a long search must not hold up the marks
	lane    *publish.Lane
	settler *settler
	holds   *holds
	seen    *seen
	// wal proves that the WAL brought everything up to an LSN; nil while none is
	// read. feed then is the reader's side, which has rows in hand too.
	wal interface {
		AwaitReceived(context.Context, outbox.LSN) error
	}
	feed *feed

	announced atomic.Bool // see Relay.listen

	wake chan struct{}
	mu   sync.Mutex
	next time.Time // of the next pass; guarded by mu

	healing     bool                        // see heal
	lookAt      map[*outbox.Table]time.Time // when recorded rows are looked for next
	again       map[*outbox.Table]bool      // the last pass over recorded rows sent some
	lockedSince map[*outbox.Table]time.Time // since when every pass has met locked rows
}

// polled is a row of the table in the lane.
type polled struct {
	*pass
	attempts int
}

// pass counts what one pass has sent and is not settled.
type pass struct {
	mu      sync.Mutex
	pending int
	done    chan struct{} // closed when wait is over

	looks    bool // at recorded rows, too
	full     bool // there is more than it looked at
	sent     bool // something
	locked   []outbox.Ref
	blocked  map[aggregate]bool // rows that somebody has locked keep the later ones out
	recorded map[aggregate]bool // recorded rows of these were sent
	missed   []string
}

func (p *pass) add() {
	p.mu.Lock()
	p.pending++
	p.mu.Unlock()
}

// Settled implements waiter.
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

func (r *Relay) newLoop(ctx context.Context, lane *publish.Lane, s *settler, h *holds, seen *seen) (*loop, error) {
	db, err := r.openLoop(ctx)
	if err != nil {
		return nil, err
	}
	l := &loop{
		r: r, db: db, lane: lane, settler: s, holds: h, seen: seen, wake: make(chan struct{}, 1),
		lookAt: map[*outbox.Table]time.Time{}, again: map[*outbox.Table]bool{}, lockedSince: map[*outbox.Table]time.Time{},
	}
	s.parked = l.nudge
	return l, nil
}

func (r *Relay) openLoop(ctx context.Context) (*fallback.DB, error) {
	db, err := fallback.Open(ctx, r.database())
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
func (l *loop) nudge() { l.dueIn(0) }

// dueIn asks for a pass after a time.
func (l *loop) dueIn(d time.Duration) {
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
func (l *loop) run(ctx context.Context) error {
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
func (l *loop) recover(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	if code := fallback.Code(err); l.lane.Err() != nil || strings.HasPrefix(code, "57P") {
		return err
	}
	l.r.trouble("the tables cannot be searched: trying again", err)
	l.dueIn(time.Second)
	if l.db.Alive() {
		return nil
	}
	db, err := l.r.openLoop(ctx)
	if err != nil {
		return err
	}
	l.db.Close()
	l.db = db
	return nil
}

func (l *loop) interval() time.Duration {
	if l.wal == nil && !l.announced.Load() {
		return pollInterval
	}
	return l.r.cfg.FallbackInterval
}

func (l *loop) sleep(ctx context.Context) {
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

// heal delivers what is recorded and may be sent, in its order, and nothing else:
// it comes before the WAL is read.
func (l *loop) heal(ctx context.Context) error {
	l.healing = true
	defer func() { l.healing = false }()
	for {
		more, err := l.passes(ctx)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		switch {
		case err != nil:
			if err := l.recover(ctx, err); err != nil || l.seen.healed == 0 {
				return err
			}
			sleep(ctx, time.Second) // what was lost comes first
		case !more && l.unmarked():
			sleep(ctx, 20*time.Millisecond)
		case !more:
			return nil // what is locked keeps its aggregate held, and nobody else waiting
		}
	}
}

// heals reports whether rows without a record are delivered before the WAL is read:
// where no record can say which of them the stream has lost.
func (l *loop) heals(t *outbox.Table) bool { return l.seen.healed > 0 && !t.Layout.Records() }

// unmarked reports whether rows of such a table are in the lane. The WAL is about to
// bring them, and the table would still show them as pending.
func (l *loop) unmarked() (has bool) {
	l.lane.Unsettled(func(ref outbox.Ref) { has = has || l.heals(ref.Table) })
	return has
}

// answer waits until every row that is pending when it is called is answered:
// delivered, or found delayed, parked or held. The loop must be running.
func (l *loop) answer(ctx context.Context) error {
	db, err := l.r.openLoop(ctx) // the loop's own is at work
	if err != nil {
		return err
	}
	defer db.Close()
	xid, err := db.NextXID(ctx) // of no row that is visible now
	if err != nil {
		return err
	}
	for _, t := range l.r.cfg.Outboxes {
		for {
			left, err := db.FreshBefore(ctx, t, l.r.cfg.DelayThreshold, xid)
			if err != nil && !fallback.Passing(err) {
				return err
			}
			if err == nil && !left {
				break // rows of the table that come now are not asked for
			}
			l.nudge()
			if !sleep(ctx, 50*time.Millisecond) {
				return context.Cause(ctx)
			}
		}
	}
	return nil
}

// passes makes a pass over each table. It reports whether there is more that can be
// sent now. A table that cannot be searched keeps no other one waiting.
func (l *loop) passes(ctx context.Context) (more bool, err error) {
	for _, t := range l.r.cfg.Outboxes {
		if t.Mark == outbox.MarkNone {
			continue
		}
		again, e := l.turn(ctx, t)
		more, err = more || again, errors.Join(err, e)
		if ctx.Err() != nil || l.lane.Err() != nil {
			return false, err
		}
	}
	return more, err
}

// turn is a pass and what follows it.
func (l *loop) turn(ctx context.Context, t *outbox.Table) (more bool, err error) {
	// First: what falls due after this look is seen by the next pass, what has
	// before, by this one.
	if err := l.schedule(ctx, t); err != nil {
		return false, err
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
	case l.holds.closing():
		l.dueIn(20 * time.Millisecond)
	case p.full, len(p.locked) > 0:
		l.dueIn(time.Second)
	}
	return more, nil
}

// schedule sets the clock for the next row that falls due.
func (l *loop) schedule(ctx context.Context, t *outbox.Table) error {
	wait, ok, err := l.db.NextDue(ctx, t)
	if ok {
		l.dueIn(wait)
	}
	return err
}

// pass is one round over a table.
func (l *loop) pass(ctx context.Context, t *outbox.Table, p *pass) error {
	var recorded []fallback.Candidate
	var err error
	if p.looks = l.looks(t); p.looks {
		begun := time.Now()
		recorded, err = l.db.Recorded(ctx, t, l.r.cfg.OnPoison != Skip, passRows)
		l.lookAt[t] = time.Now().Add(max(recordedPause, recordedShare*time.Since(begun)))
		if err != nil {
			return err
		}
	}
	var fresh []fallback.Candidate
	if !l.healing || l.heals(t) {
		fresh, err = l.db.Fresh(ctx, t, l.r.cfg.DelayThreshold, passRows)
	}
	if err != nil || len(recorded)+len(fresh) == 0 {
		return err
	}
	crash("listed")
	p.full = len(recorded) == passRows || len(fresh) == passRows
	if err := l.prove(ctx); err != nil {
		return err
	}
	for _, c := range recorded {
		l.holds.open(aggregate{t, c.Aggregate}) // whoever has recorded it
	}
	if len(recorded) > 0 { // the cause of a failure may be gone
		info, err := l.r.stream.Info(ctx)
		if err != nil { // while nothing can be sent, a failure says nothing
			recorded = nil
			l.dueIn(time.Second)
		} else {
			l.lane.Adapt(info)
		}
	}
	inHand := l.inHand(t)
	free := func(cs []fallback.Candidate) []fallback.Candidate {
		return slices.DeleteFunc(cs, func(c fallback.Candidate) bool {
			sent, taken := inHand[c.ID]
			if of := (aggregate{t, c.Aggregate}); taken && !sent && c.Recorded {
				l.dueIn(recordedPause)
				if of.ordered() && l.r.cfg.OnPoison != Skip {
					p.blocked[of] = true // it is being recorded anew: the later ones wait for that
				}
			}
			return taken
		})
	}
	for _, cs := range [][]fallback.Candidate{free(recorded), free(fresh)} {
		for len(cs) > 0 {
			n, err := l.deliver(ctx, t, p, cs[:batch(cs, l.r.cfg.FallbackBatch)])
			if err != nil {
				return err
			}
			cs = cs[n:]
		}
	}
	return nil
}

// batch is how many rows are read at once: at most so many, and not many large
// ones.
func batch(cs []fallback.Candidate, most int) int {
	n := 0
	for bytes := 0; n < min(len(cs), most); n++ {
		if bytes += cs[n].Bytes; bytes > batchBytes && n > 0 {
			break
		}
	}
	return n
}

// looks reports whether it is time to look at recorded rows.
func (l *loop) looks(t *outbox.Table) bool {
	rest := time.Until(l.lookAt[t])
	if rest > 0 && !l.healing && !l.again[t] && !l.holds.closing() {
		l.dueIn(rest)
		return false
	}
	return true
}

// prove waits until everything that was committed when it is called has been
// received from the WAL, and tells the lane how far that is. What is then not in
// hand and still pending, nobody else will send.
func (l *loop) prove(ctx context.Context) error {
	lsn, err := l.db.InsertLSN(ctx)
	if err != nil {
		return err
	}
	if l.wal != nil {
		if err := l.db.Flush(ctx); err != nil {
			return err
		}
		if err := l.wal.AwaitReceived(ctx, lsn); err != nil {
			return err
		}
	}
	crash("proven")
	l.lane.Pass(lsn)
	return nil
}

// inHand is every row of the table that is on its way already: it waits in the
// gate or in a hold's queue, is being recorded, or is in the lane, and only then
// sent. Rows move in this order, so none slips through.
func (l *loop) inHand(t *outbox.Table) (sent map[string]bool) {
	ids, inLane := map[string]bool{}, false
	add := func(ref outbox.Ref) {
		if ref.Table == t {
			ids[ref.ID] = inLane
		}
	}
	if l.feed != nil {
		l.feed.gated(add)
	}
	l.holds.queued(add)
	l.settler.busy(add)
	inLane = true
	l.lane.Unsettled(add)
	return ids
}

// deliver reads rows and sends them, in the order of their ids. It returns how many
// of them it has dealt with: not all, where they are large.
func (l *loop) deliver(ctx context.Context, t *outbox.Table, p *pass, cs []fallback.Candidate) (n int, err error) {
	ids := make([]string, len(cs))
	for i, c := range cs {
		ids[i] = c.ID
	}
	rows, more, err := l.db.Fetch(ctx, t, ids)
	if err != nil {
		return 0, err
	}
	if more {
		last := slices.Index(ids, string(rows[len(rows)-1].Values[outbox.ID]))
		cs, ids = cs[:last+1], ids[:last+1]
	}
	if err := l.findLocked(ctx, t, p, ids, rows); err != nil {
		return 0, err
	}
	byID := map[string]*outbox.Event{}
	for _, ev := range rows {
		byID[string(ev.Values[outbox.ID])] = ev
	}
	for _, c := range cs {
		of := aggregate{t, c.Aggregate}
		if slices.ContainsFunc(p.locked, func(ref outbox.Ref) bool { return ref.ID == c.ID }) {
			p.blocked[of] = of.ordered()
		}
		if c.Early {
			p.blocked[of] = of.ordered()
		}
		ev := byID[c.ID]
		if ev == nil || c.Early || p.blocked[of] {
			continue
		}
		if recorded := ev.Values[outbox.LastError] != nil; recorded != c.Recorded || recorded && attemptsOf(ev) != c.Attempts {
			p.blocked[of] = of.ordered() // it was recorded after it was listed
			continue
		}
		if err := l.send(ctx, p, ev, c.Scheduled); err != nil {
			return 0, err
		}
	}
	return len(cs), nil
}

// findLocked notes which of the rows that could not be read are locked.
func (l *loop) findLocked(ctx context.Context, t *outbox.Table, p *pass, ids []string, rows []*outbox.Event) error {
	if len(rows) == len(ids) {
		return nil
	}
	got := map[string]bool{}
	for _, ev := range rows {
		got[string(ev.Values[outbox.ID])] = true
	}
	missing := slices.DeleteFunc(slices.Clone(ids), func(id string) bool { return got[id] })
	pending, err := l.db.StillPending(ctx, t, missing)
	for _, id := range pending {
		p.locked = append(p.locked, outbox.Ref{Table: t, ID: id})
	}
	return err
}

// send hands one row to the lane, or to the settler where that is its place.
func (l *loop) send(ctx context.Context, p *pass, ev *outbox.Event, scheduled bool) error {
	of := aggregateOf(ev)
	row := fallback.Row{Ref: ev.Ref(), Polled: true, Attempts: attemptsOf(ev)}
	recorded := ev.Values[outbox.LastError] != nil
	if behind, ok := l.seen.behind(row.Ref, recorded); ok {
		p.add()
		return l.settler.stored(ctx, row, behind, p) // it was read in the stream
	}
	if !recorded && l.r.cfg.OnPoison != Skip && of.ordered() && l.holds.has(of) {
		l.holds.record(of)
		p.add()
		return l.settler.hold(ctx, row, of, p)
	}
	if recorded && l.feed != nil {
		l.holds.close(of)
	}
	p.add()
	err := l.lane.SendPolled(ctx, ev, &polled{p, row.Attempts})
	var failure *publish.RowError
	switch {
	case errors.As(err, &failure):
		row.Failure = failure.Error()
		p.blocked[of] = l.r.cfg.OnPoison != Skip && of.ordered()
		l.r.refused(row.Ref, string(ev.Values[outbox.EventType]), failure)
		return l.settler.park(ctx, row, of, p)
	case err != nil:
		return err
	}
	crash("polled")
	p.sent = true
	if recorded {
		p.recorded[of] = true
	}
	if l.wal != nil && !recorded && !scheduled {
		p.missed = append(p.missed, row.Ref.ID)
	}
	return nil
}

func attemptsOf(ev *outbox.Event) int {
	n, _ := strconv.Atoi(string(ev.Values[outbox.Attempts]))
	return n
}

// endHolds ends the holds of aggregates that have no record left, and lets those
// that keep one record their queues.
func (l *loop) endHolds(ctx context.Context, t *outbox.Table, p *pass) error {
	quiet := l.holds.quiet(t)
	if len(quiet) == 0 {
		return nil
	}
	keys, err := l.db.Aggregates(ctx, t)
	if err != nil {
		return err
	}
	recorded := map[aggregate]bool{}
	for _, key := range keys {
		of := aggregate{t, key}
		recorded[of] = true
		if !p.recorded[of] { // nothing of it can be sent for now
			if err := l.recordQueue(ctx, of); err != nil {
				return err
			}
		}
	}
	for of, joined := range quiet {
		if recorded[of] {
			continue
		}
		if err := l.holds.end(of, joined, func(q held) error { return l.sendQueued(ctx, q) }); err != nil {
			var failure *publish.RowError
			if !errors.As(err, &failure) {
				return err
			}
			if err := l.recordQueue(ctx, of); err != nil {
				return err
			}
		}
	}
	return nil
}

// sendQueued sends a row that queued up behind a hold that has ended. The WAL has
// brought it, and the lane's position is past it.
func (l *loop) sendQueued(ctx context.Context, q held) error {
	l.lane.Pass(q.ev.Commit)
	err := l.lane.SendPolled(ctx, q.ev, q.txn)
	var failure *publish.RowError
	if errors.As(err, &failure) {
		l.r.refused(q.ev.Ref(), string(q.ev.Values[outbox.EventType]), failure)
		row := fallback.Row{Ref: q.ev.Ref(), XID: q.ev.XID, Failure: failure.Error()}
		return errors.Join(err, l.settler.park(ctx, row, aggregateOf(q.ev), q.txn))
	}
	return err
}

func (l *loop) recordQueue(ctx context.Context, of aggregate) error {
	return l.holds.reopen(of, func(q held) error {
		return l.settler.hold(ctx, fallback.Row{Ref: q.ev.Ref(), XID: q.ev.XID}, of, q.txn)
	})
}

// report says what a pass has found.
func (l *loop) report(ctx context.Context, t *outbox.Table, p *pass) {
	if n := len(p.missed); n > 0 {
		l.r.metrics.missed.Add(float64(n))
		if !l.r.limited("missed", 10*time.Second) {
			l.r.alarm("missed_rows", "the WAL did not bring rows that are pending in the table: they were delivered from there, late",
				zapTable(t), zap.Int("rows", n), zap.String("first_id", p.missed[0]), zap.String("last_id", p.missed[n-1]))
		}
	}
	if len(p.locked) == 0 {
		delete(l.lockedSince, t)
		return
	}
	if l.lockedSince[t].IsZero() {
		l.lockedSince[t] = time.Now()
	}
	if time.Since(l.lockedSince[t]) < lockedAlarm || l.r.limited("pending_locked", 30*time.Second) {
		return
	}
	ref := p.locked[0]
	who, err := l.db.Blocker(ctx, t, ref.ID)
	if err != nil {
		who = err.Error()
	}
	l.r.alarm("row_locked", "a pending row is locked by another session and cannot be delivered, nor the later rows of its aggregate",
		zap.String("row", t.String()+"/"+ref.ID), zap.String("holder", who))
}
