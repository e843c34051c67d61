package relay

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// seen is what a session knows from reading the stream back.
type seen struct {
	found jetstream.Found
	// until is E: the greatest LSN under which anything can have been sent. Up to
	// there the table decides about every row that the WAL brings.
	until outbox.LSN
	// tail is the newest own message's position where it is of this WAL.
	tail outbox.Position
	// stored are rows of the newest steps that the table does not show, perhaps
	// not yet, with the number of own messages behind each, until the WAL has
	// passed E. About every other row that was read back the table decides.
	stored map[outbox.Ref]uint64
	// sent are the rows of the newest U messages, of tables without marks, where the tail
	// does not say it all: one of them may be missing among the others, or the tail is not
	// of this WAL. From sentFrom on they are complete.
	sent     map[outbox.Ref]struct{}
	sentFrom outbox.Position
	// unmarked are rows that are in the stream and could not be marked yet, with
	// the number of own messages behind each.
	unmarked map[outbox.Ref]uint64
	// mu guards stored and unmarked: the loop looks, too.
	mu sync.Mutex
	// healed counts rows that JetStream had lost and that are pending again. It is
	// set before the loop looks.
	healed int
	past   bool // the WAL is past E; the reader's own
}

// bygone reports whether the row may have been sent before.
func (s *seen) bygone(ev *outbox.Event) bool { return ev.Commit <= s.until }

// behind reports whether the row's message was read in the stream although the
// table does not show the row as stored, and how many own messages follow it. A
// recorded row was not invisible then: if the table did not show it, it has come
// back since, to be delivered again.
func (s *seen) behind(ref outbox.Ref, recorded bool) (n uint64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n, ok = s.unmarked[ref]; !ok && !recorded {
		n, ok = s.stored[ref]
	}
	return n, ok
}

// displaced reports whether a row without a mark is not in the stream although later ones
// are. Messages are under way one behind the other; where another writer's takes the place
// of one of them, that one is refused, and those behind it fit. The lane ends with that, so
// less than U messages can follow it, and the next session sends it first.
func (s *seen) displaced(ev *outbox.Event) bool {
	if s.sent == nil || s.sentFrom.Covers(ev.Commit, ev.N) {
		return false
	}
	_, sent := s.sent[ev.Ref()]
	return !sent
}

// wasSent reports whether a row without a mark that the tail does not cover was read in the
// stream, which a server that was put back to an earlier state brings again.
func (s *seen) wasSent(ev *outbox.Event) bool {
	if len(s.sent) == 0 {
		return false
	}
	_, sent := s.sent[ev.Ref()]
	return sent
}

// forget drops what the WAL will not bring any more: it is past E.
func (s *seen) forget() {
	if s.past {
		return
	}
	s.past = true
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stored, s.unmarked, s.sent = nil, nil, nil
}

// readBack looks at the relay's newest messages and marks those whose rows are
// still pending: what was stored by a session that could not mark it. It goes
// back, in steps of U, until a step shows nothing pending and nothing marked
// later than the oldest mark of the newest step. Then it marks, the oldest row
// first: broken off at any point, it leaves the pending rows at the tail, where
// the next one finds them.
func (r *Relay) readBack(ctx context.Context, db *fallback.DB, wal *stream.Session, sys stream.System, info *jetstream.StreamInfo) (*seen, error) {
	r.noticeLoss(info)
	b := &reader{
		r: r, info: info, db: db, wal: wal, ctx: ctx, tables: map[string]*outbox.Table{}, refs: map[outbox.Ref]struct{}{}, changed: map[changed]struct{}{},
		from: map[*outbox.Table]time.Time{},
	}
	b.seen = &seen{unmarked: map[outbox.Ref]uint64{}, stored: map[outbox.Ref]uint64{}, sent: map[outbox.Ref]struct{}{}}
	for _, t := range r.cfg.Outboxes {
		b.tables[t.String()] = t
	}
	options := jetstream.ReadBackOptions{Source: r.envelope.Source(), Phantom: sys.Phantom, Step: b.look, NoConsumer: r.alarmNoConsumer}
	var err error
	if b.seen.found, err = r.stream.ReadBack(ctx, info.FirstSeq, info.LastSeq, options); err != nil {
		return nil, err
	}
	b.trimmed = b.wanted && info.FirstSeq > 1
	if err := r.resolveUntil(ctx, db, sys, b.seen); err != nil {
		return nil, err
	}
	if f := b.seen.found; f.Foreign == 0 && !f.Disordered && b.seen.tail.Commit > 0 {
		b.seen.sent = nil
	} else if f.Own < jetstream.U && info.FirstSeq <= 1 || !sys.Comparable(b.seen.sentFrom) {
		b.seen.sentFrom = outbox.Position{} // nothing of this WAL is further back
	}
	if err := b.compareOnce(); err != nil {
		return nil, err
	}
	if b.oldest.Seq > 0 {
		options.Step = b.mark
		if err := r.stream.ReadOn(ctx, b.oldest.Seq, info.LastSeq, options); err != nil {
			return nil, err
		}
	}
	if n := b.seen.found.Phantoms; n > 0 {
		r.alarm("phantoms", "the stream holds events of transactions that this server never had (lost in a failover)", zap.Int("messages", n))
	}
	return b.seen, nil
}

// alarmNoConsumer: the limit may be the account's, which nothing else tells.
func (r *Relay) alarmNoConsumer(err error) {
	if !r.limited("no_consumer", time.Hour) {
		r.alarm("no_consumer", "the stream or the account has as many consumers as it may: messages are read back one by one, slowly",
			zap.Error(err), zap.String("hint", "raise max_consumers, or remove a consumer"))
	}
}

// noticeLoss compares the stream with what this process has seen of it.
func (r *Relay) noticeLoss(info *jetstream.StreamInfo) {
	if !r.known.created.IsZero() && !info.Created.Equal(r.known.created) {
		r.alarm("stream_replaced", "the stream is another one than before", zap.Time("created", info.Created), zap.Time("before", r.known.created))
		r.known.lastSeq = 0
	}
	if info.LastSeq < r.known.lastSeq {
		r.alarm("stream_rolled_back", "the stream ends before a message that JetStream had acknowledged",
			zap.Uint64("last_seq", info.LastSeq), zap.Uint64("acknowledged", r.known.lastSeq))
	}
	r.known.created, r.known.lastSeq = info.Created, info.LastSeq
}

func (r *Relay) resolveUntil(ctx context.Context, db *fallback.DB, sys stream.System, s *seen) error {
	tail := s.found.Tail.Position
	end, err := db.InsertLSN(ctx)
	if err != nil {
		return err
	}
	comparable := s.found.HasTail && sys.Comparable(tail)
	if comparable && tail.Commit > end { // the passed LSN need not have been flushed, and a crash may have taken it back
		comparable = false
		r.alarm("server_rolled_back", "the stream holds an event of WAL that the server does not have: the server was restored to an earlier state of the same timeline",
			zap.Stringer("position", tail), zap.Stringer("insert_lsn", end))
	}
	if comparable {
		s.tail = tail
		s.until = max(s.tail.Commit, s.tail.Passed)
	}
	// The WAL may bring the first insert of a dead letter again, which is no row any
	// more and no message.
	died, err := db.DiedLately(ctx, r.cfg.Slot)
	if err == nil && (!comparable || s.found.Beyond || died) {
		s.until = end
	}
	return err
}

// mostCompared bounds the rows that a read-back keeps. The lane runs at most U messages past an unmarked
// row, so marks that a relay has made reach back two steps. A variable for tests.
var mostCompared = 8 * jetstream.U

// clocks is how far the two servers' clocks may be apart. A mark from longer before its message was
// stored is no relay's, and would have everything since then read.
const clocks = time.Hour

// reader is one read-back at work.
type reader struct {
	r      *Relay
	info   *jetstream.StreamInfo
	db     *fallback.DB
	wal    *stream.Session // nil where none is read
	ctx    context.Context
	tables map[string]*outbox.Table
	seen   *seen
	// refs are the rows that were read back and are marked no earlier than since
	// (T), the earliest mark among the rows of the first step, whatever their
	// table: one clock made them all. compared is set where a table still has
	// one of the rows.
	refs     map[outbox.Ref]struct{}
	givenUp  bool // there are more than mostCompared, or more changed ones
	early    int  // rows of the first step whose marks are no relay's, see clocks
	compared bool
	// from is the earliest mark among the rows of each table that were read back.
	// Earlier marks of the table may be another relay's, which had it before.
	from map[*outbox.Table]time.Time
	// changed are rows that the table shows otherwise than their messages do, or other
	// ones that have got their ids.
	changed map[changed]struct{}
	since   time.Time
	stepNo  int
	// wanted is set where the last step asked for another one; trimmed, where the
	// stream had none because it has dropped its oldest messages.
	wanted, trimmed bool
	inserts         *inserts // nil where the WAL was not asked
	// oldest is the oldest message whose row is pending; Seq is 0 without one.
	// passed counts the messages on the way on from it.
	oldest jetstream.Message
	passed uint64
}

type changed struct {
	table *outbox.Table
	id    string
}

// look is the way back: it finds out how far the read-back has to go.
func (b *reader) look(messages []jetstream.Message) (more bool, err error) {
	if b.stepNo++; b.stepNo == 1 {
		for _, m := range messages {
			if t := b.tables[m.ID.Table]; t != nil && t.Mark == outbox.MarkNone {
				b.seen.sent[outbox.Ref{Table: t, ID: m.ID.ID, Hash: m.ID.Hash}] = struct{}{}
			}
		}
		b.seen.sentFrom = messages[len(messages)-1].Position
	}
	err = b.each(messages, func(t *outbox.Table, ms []jetstream.Message, rows []fallback.Row, states []fallback.State) error {
		for i, s := range states {
			more = b.note(t, ms[i], rows[i].Ref, s) || more
		}
		return nil
	})
	b.wanted = more
	return more, err
}

// note reports whether a row asks for another step: it is pending, or marked no
// earlier than the oldest of the first step.
func (b *reader) note(t *outbox.Table, m jetstream.Message, ref outbox.Ref, s fallback.State) bool {
	b.compared = b.compared || s.Exists
	switch {
	case !s.Exists || !s.Same:
		switch full := len(b.changed) >= mostCompared; {
		case s.Exists && full:
			b.givenUp = true
		case s.Exists:
			b.changed[changed{t, ref.ID}] = struct{}{}
		}
		// Gone, or not visible yet: then its message lies within U of the tail.
		if b.stepNo <= 2 {
			b.seen.stored[ref] = m.Behind
		}
		return false
	case s.Pending:
		if b.oldest.Seq == 0 || m.Seq < b.oldest.Seq {
			b.oldest = m
		}
		return true
	case s.ProcessedAt.IsZero():
		return false
	}
	if from := b.from[t]; from.IsZero() || s.ProcessedAt.Before(from) {
		b.from[t] = s.ProcessedAt
	}
	switch {
	case b.stepNo > 1:
	case !s.ProcessedAt.After(m.Stored.Add(-clocks)):
		b.early++
	case b.since.IsZero() || s.ProcessedAt.Before(b.since):
		b.since = s.ProcessedAt
	}
	if b.since.IsZero() || s.ProcessedAt.Before(b.since) {
		return false
	}
	if len(b.refs) >= mostCompared {
		b.givenUp = true
		return false
	}
	b.refs[ref] = struct{}{}
	return true
}

// mark is the way on: it marks what is pending, the oldest first.
func (b *reader) mark(messages []jetstream.Message) (more bool, err error) {
	for i := range messages {
		if messages[i].Behind = 0; b.oldest.Behind > b.passed {
			messages[i].Behind = b.oldest.Behind - b.passed
		}
		b.passed++
	}
	return true, b.each(messages, func(t *outbox.Table, ms []jetstream.Message, rows []fallback.Row, states []fallback.State) error {
		var pending []fallback.Row
		var claims []jetstream.Message
		for i, s := range states {
			if s.Exists && s.Same && s.Pending {
				pending, claims = append(pending, rows[i]), append(claims, ms[i])
			}
		}
		pending, behind, err := b.genuine(t, claims, pending)
		if err != nil || len(pending) == 0 {
			return err
		}
		return b.settle(t, pending, behind)
	})
}

// each asks the tables about the rows of messages, in batches and in the
// messages' order.
func (b *reader) each(messages []jetstream.Message, do func(*outbox.Table, []jetstream.Message, []fallback.Row, []fallback.State) error) error {
	for part := range slices.Chunk(messages, settleBatch) {
		for t, ms := range b.byTable(part) {
			rows := make([]fallback.Row, len(ms))
			for i, m := range ms {
				rows[i] = fallback.Row{Ref: outbox.Ref{Table: t, ID: m.ID.ID, Hash: m.ID.Hash}, Bytes: m.Bytes}
			}
			states, err := b.lookUp(t, rows)
			if err != nil {
				return err
			}
			if err := do(t, ms, rows, states); err != nil {
				return err
			}
		}
	}
	return nil
}

// byTable sorts out the messages whose rows can be asked for.
func (b *reader) byTable(messages []jetstream.Message) map[*outbox.Table][]jetstream.Message {
	sorted := map[*outbox.Table][]jetstream.Message{}
	for _, m := range messages {
		if t := b.tables[m.ID.Table]; t != nil && t.Mark != outbox.MarkNone && !m.ID.Replay {
			sorted[t] = append(sorted[t], m)
		}
	}
	return sorted
}

func (b *reader) lookUp(t *outbox.Table, rows []fallback.Row) ([]fallback.State, error) {
	for {
		states, err := b.db.LookUp(b.ctx, t, rows)
		if err == nil || !fallback.Passing(err) || !b.db.Alive() {
			return states, err
		}
		b.r.trouble("rows that were read back cannot be looked up: trying again", err, zapTable(t))
		if !sleep(b.ctx, 200*time.Millisecond) {
			return nil, b.ctx.Err()
		}
	}
}

func (b *reader) settle(t *outbox.Table, rows []fallback.Row, behind []uint64) error {
	verdicts, err := b.db.Mark(b.ctx, t, rows)
	if err != nil && (!fallback.Passing(err) || !b.db.Alive()) {
		return err
	}
	marked := 0
	for i, row := range rows {
		if err == nil && verdicts[i] == fallback.Done {
			marked++
			continue
		}
		b.seen.unmarked[row.Ref] = behind[i]
	}
	if n := len(b.seen.unmarked); n > mostCompared { // somebody has made many pending again, and has them locked
		return fmt.Errorf("mark rows of %s that were read back: %d cannot be marked yet", t, n)
	}
	b.r.log.Info("marked rows that were found in the stream", zapTable(t), zap.Int("rows", marked), zap.Int("waiting", len(rows)-marked))
	return nil
}

// compareOnce compares, unless the session before this one has done so, and has ended because it
// had read the WAL for that.
func (b *reader) compareOnce() error {
	before := b.r.known.compared
	if b.r.known.compared = (compared{}); before.holds(b.info) {
		b.seen.healed = before.healed
		return nil
	}
	err := b.compare()
	if b.inserts == nil {
		return err
	}
	b.inserts.stop()
	if err == nil {
		b.r.known.compared = compared{b.info, b.seen.healed}
		err = errInsertsRead
	}
	return err
}

// compare looks for rows that carry a mark from the time that was read back and
// are not in the stream: JetStream has lost them.
func (b *reader) compare() error {
	if b.compared && b.since.IsZero() {
		if b.early > 0 {
			b.r.alarm("comparison_given_up", "the newest messages were stored long after their rows were marked, as where the clocks of the two servers are apart: "+
				"whether the stream has lost one of them is not known", zap.Int("rows", b.early), zap.Duration("apart", clocks))
		}
		return nil // every other row that was read back was pending until now
	}
	if b.givenUp {
		b.giveUp(b.since)
		return nil
	}
	for _, t := range b.r.cfg.Outboxes {
		compare := b.heal
		if b.from[t].IsZero() {
			compare = b.alarmUnreadable
		}
		if err := compare(t); err != nil {
			return err
		}
	}
	return nil
}

func (b *reader) giveUp(since time.Time) {
	b.r.alarm("comparison_given_up", "more rows carry late marks, or were changed, than are compared with the stream: whether it has lost one of them is not known",
		zap.Int("compared", len(b.refs)), zap.Time("marked_since", since))
}

// heal makes rows pending again that are marked and not in the stream. They are
// delivered from the table, before any WAL is read.
func (b *reader) heal(t *outbox.Table) error {
	since := b.since
	if from := b.from[t]; from.After(since) {
		since = from
	}
	if b.trimmed { // of the rows that were marked together at that time, some may have been dropped
		since = since.Add(time.Microsecond)
	}
	var next fallback.MarkCursor
	var first, last string
	lost, rewritten := 0, 0
	for {
		marked, err := b.db.MarkedSince(b.ctx, t, since, &next, settleBatch)
		if err != nil {
			return err
		}
		gone := slices.DeleteFunc(slices.Clone(marked), func(row fallback.MarkedRow) bool {
			if _, ok := b.refs[row.Ref]; ok {
				return true
			}
			_, ok := b.changed[changed{t, row.ID}]
			if ok {
				rewritten++
			}
			return ok
		})
		gone, full, err := b.leaveInserted(t, gone)
		if err != nil {
			return err
		}
		if full {
			b.giveUp(since)
			return nil
		}
		if len(gone) > 0 {
			if lost == 0 {
				first = gone[0].ID
				if err := b.confirm(); err != nil {
					return err
				}
			}
			lost, last = lost+len(gone), gone[len(gone)-1].ID
			if err := b.unmark(t, gone); err != nil {
				return err
			}
			crash("unmarked")
		}
		if len(marked) < settleBatch {
			break
		}
	}
	if rewritten > 0 && !b.r.limited("rows_changed/"+t.String(), time.Hour) {
		b.r.alarm("rows_changed", "marked rows are not what the stream holds under their ids: they were changed after they had been stored, "+
			"or their ids were used again; whether the stream has lost one of them cannot be told", zapTable(t), zap.Int("rows", rewritten))
	}
	if lost == 0 {
		return nil
	}
	b.seen.healed += lost
	b.r.metrics.lost.Add(float64(lost))
	b.r.alarm("events_lost", "rows are marked as stored, but the stream does not hold them: JetStream has lost them, and they are delivered again",
		zapTable(t), zap.Int("rows", lost), zap.String("first_id", first), zap.String("last_id", last))
	return nil
}

// confirm fails unless what was read back was the stream's end: rows look lost where a
// leader has answered that was cut off from the others.
func (b *reader) confirm() error {
	info, err := b.r.stream.Confirm(b.ctx)
	if err != nil {
		return err
	}
	if !info.Created.Equal(b.info.Created) || info.LastSeq < b.info.LastSeq {
		return errors.New("read the stream back: it is another one, or has lost messages, since")
	}
	more := jetstream.ReadBackOptions{Source: b.r.envelope.Source(), Step: func(messages []jetstream.Message) (bool, error) {
		if len(messages) > 0 {
			return false, errors.New("read the stream back: it did not end where its leader said")
		}
		return true, nil
	}}
	return b.r.stream.ReadOn(b.ctx, b.info.LastSeq+1, info.LastSeq, more)
}

// unmark waits for rows that somebody has locked: nothing of their aggregates may
// be delivered before them.
func (b *reader) unmark(t *outbox.Table, rows []fallback.MarkedRow) error {
	for begun, named := time.Now(), false; ; {
		_, left, err := b.db.Unmark(b.ctx, t, rows)
		switch {
		case err != nil && (!fallback.Passing(err) || !b.db.Alive()):
			return err
		case err != nil:
			b.r.trouble("rows that the stream has lost cannot be made pending: trying again", err, zapTable(t))
		case len(left) == 0:
			return nil
		default:
			rows = left
			if !named && time.Since(begun) > lockedAlarm {
				named = true
				who, err := b.db.Blocker(b.ctx, t, rows[0].ID)
				if err != nil {
					who = err.Error()
				}
				b.r.alarm("row_locked", "a row that the stream has lost cannot be made pending: nothing is delivered before it",
					zap.Stringer("row", rows[0].Ref), zap.String("holder", who))
			}
		}
		if !sleep(b.ctx, 200*time.Millisecond) {
			return b.ctx.Err()
		}
	}
}

// alarmUnreadable: the table has marks of the time that was read back, and no message
// of one of its rows was.
func (b *reader) alarmUnreadable(t *outbox.Table) error {
	marked, err := b.db.MarkedSince(b.ctx, t, b.since, &fallback.MarkCursor{}, 1) // archived ones are not compared
	if err != nil || len(marked) == 0 {
		return err
	}
	b.r.alarm("nothing_to_compare", "rows are marked as stored, but none of the stream's messages can be compared with them: "+
		"the stream was emptied, has expired, or is not the one they were stored in, as where another relay had the table before", zapTable(t))
	return nil
}
