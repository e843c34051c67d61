package relay

import (
	"context"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// recovery finds out which rows earlier sessions have sent. It marks those that they could not mark, and
// makes those pending again that JetStream has lost. In this order:
//
//  1. backwardScan reads the stream from its tail. It only looks.
//  2. The recovery LSN is resolved: up to there decide.go asks the table about rows of the WAL.
//  3. comparison finds the rows that JetStream has lost.
//  4. noter writes that a session runs, and where the stream ended.
//  5. forwardScan marks the rows that the first pass found pending. noter writes again.
//
// It runs on the goroutine of the session's start.
type recovery struct {
	*reporter
	*servers
	past *history
	db   *table.DB
	wal  *stream.Session // nil where none is read
	sys  stream.System
	info *jetstream.StreamInfo

	noter *noter // set by run
}

func (r *recovery) run(ctx context.Context) (s *recoveryState, err error) {
	r.noticeLoss()
	options := jetstream.ScanOptions{
		Source: r.envelope.Source(), Phantom: r.sys.Phantom, NoConsumer: r.alarmNoConsumer,
	}
	known, err := r.readNotes(ctx, r.db, r.info)
	if err != nil {
		return nil, err
	}
	rows := newMessageRows(r.reporter, r.db, r.outboxes, known.like)
	options.May = rows.may
	end, err := r.db.InsertLSN(ctx)
	if err != nil {
		return nil, err
	}
	var top outbox.Position // the greatest of this WAL
	options.Passes = func(m jetstream.Message) bool {
		known.see(m)
		if p := m.Position; r.sys.Comparable(p) && p.Commit <= end {
			passed := max(top.Passed, min(p.Passed, end))
			if !top.Covers(p.Commit, p.N) {
				top = p
			}
			top.Passed = passed
		}
		// Nothing may say how far behind the messages of other outboxes those of this relay are.
		return !known.complete && rows.tables[m.ID.Table] == nil
	}
	times, err := r.readTimes(ctx, rows)
	if err != nil {
		return nil, err
	}
	back, err := scanBackward(ctx, r.stream, rows, known, times, r.info, false, options)
	if err == nil && back.full {
		if err = r.awaitOpen(ctx); err == nil {
			back, err = scanBackward(ctx, r.stream, rows, known, times, r.info, true, options)
		}
	}
	if err != nil {
		return nil, err
	}
	s = &recoveryState{
		found: back.found, notShown: back.notShown, like: known.like, isOwn: r.isOwn(known.like),
	}
	if err := r.resolveRecoveryLSN(ctx, s, known, top, end); err != nil {
		return nil, err
	}
	c := &comparison{
		reporter: r.reporter, servers: r.servers, before: &r.past.compared,
		db: r.db, wal: r.wal, info: r.info, notes: known, marks: back.marks,
		trimmed: back.more && r.info.FirstSeq > 1,
	}
	if s.healed, err = c.runOnce(ctx); err != nil {
		return nil, err
	}
	r.noter = &noter{
		reporter: r.reporter, db: r.db, slot: r.cfg.Slot, tables: r.outboxes,
		exists: known.exists, rows: known.rows,
	}
	r.noter.awaits = s.awaitsRows
	compared := slices.DeleteFunc(slices.Clone(known.rows), func(row table.Sent) bool {
		return c.incomplete[r.outbox(&row)]
	})
	read := r.read(s.found)
	awaits := len(back.notShown) > 0
	if back.oldest.Seq > 0 || awaits {
		// Until what was read back is marked, or shown, the next session has to read it, too.
		read.LastSequence = known.last(r.outboxes, read.LastSequence)
	}
	if err := r.noter.begin(ctx, read, compared); err != nil {
		return nil, err
	}
	if s.unmarked, err = scanForward(ctx, r.stream, rows, back.oldest, r.info, options); err != nil {
		return nil, err
	}
	if back.oldest.Seq > 0 && len(s.unmarked) == 0 && !awaits {
		// Rows are marked whose messages may be behind more of others' than the next session reads.
		if err := r.noter.begin(ctx, r.read(s.found), compared); err != nil {
			return nil, err
		}
	}
	if n := s.found.Phantoms; n > 0 {
		r.alarm(alarm.Phantoms, zap.Int("messages", n))
	}
	return s, nil
}

// awaitOpen waits until every transaction that is open now has ended: what it has committed is visible.
func (r *recovery) awaitOpen(ctx context.Context) error {
	r.status.do("wait for open transactions: more messages have no visible row than can be remembered")
	xid, err := r.db.NewXID(ctx)
	for ended := false; err == nil && !ended; {
		ended, err = r.db.EndedBefore(ctx, xid)
		if err == nil && !ended && !sleep.For(ctx, 200*time.Millisecond) {
			err = context.Cause(ctx)
		}
	}
	return err
}

// read is the end of the stream that was read back.
func (r *recovery) read(found jetstream.Found) table.Noted {
	read := table.Noted{StreamCreated: &r.info.Created, ReadSequence: r.info.LastSeq}
	if found.HasTail {
		read.ReadSequence = found.Tail.Seq
		read.ReadMessage = r.envelope.Source() + "/" + found.Tail.ID.String()
		read.ReadStoredAt = &found.Tail.Stored
	}
	read.LastSequence = read.ReadSequence
	return read
}

// readTimes compares the servers' clocks, and looks for each table's oldest mark.
func (r *recovery) readTimes(
	ctx context.Context, rows *messageRows,
) (map[*outbox.Table]*tableTimes, error) {
	now, err := r.db.Now(ctx)
	if err != nil {
		return nil, err
	}
	info, err := r.stream.Info(ctx)
	if err != nil {
		return nil, err
	}
	all := map[*outbox.Table]*tableTimes{}
	for _, t := range r.outboxes {
		as, err := r.db.AsMarks(ctx, t, []time.Time{now})
		if err != nil {
			return nil, err
		}
		times := &tableTimes{ahead: mostApart, stays: table.MarkOf(t).Stays()}
		if !info.At.IsZero() {
			times.ahead = info.At.Sub(as[0])
		}
		var oldest []table.MarkedRow
		const trouble = "rows that were read back cannot be looked up: trying again"
		err = rows.patiently(ctx, t, trouble, func() (err error) {
			oldest, err = r.db.MarkedSince(ctx, t, time.Time{}, &table.MarkCursor{}, 1)
			return err
		})
		if err != nil {
			return nil, err
		}
		if len(oldest) > 0 {
			times.oldest = oldest[0].Marked
		}
		all[t] = times
	}
	return all, nil
}

// isOwn is that of the recoveryState.
func (r *recovery) isOwn(like *Likenesses) func(context.Context, *outbox.Event, uint64) (bool, error) {
	return func(ctx context.Context, ev *outbox.Event, seq uint64) (bool, error) {
		own, err := like.own(ctx, r.stream, ev, 0, seq)
		if err == nil && !own {
			r.alarmForged(ev.Ref(), seq)
		}
		return own, err
	}
}

// noticeLoss compares the stream with what this process has seen of it.
func (r *recovery) noticeLoss() {
	info := r.info
	if !r.past.created.IsZero() && !info.Created.Equal(r.past.created) {
		r.alarm(alarm.StreamReplaced, zap.Time("created", info.Created), zap.Time("before", r.past.created))
		r.past.lastSeq = 0
	}
	if info.LastSeq < r.past.lastSeq {
		r.alarm(alarm.StreamRolledBack,
			zap.Uint64("last_seq", info.LastSeq), zap.Uint64("acknowledged", r.past.lastSeq))
	}
	r.past.created, r.past.lastSeq = info.Created, info.LastSeq
}

// resolveRecoveryLSN takes it from top, the greatest position that was read, or from the end of the WAL where
// the newest message does not prove that. Positions never go back: one that does is another writer's.
func (r *recovery) resolveRecoveryLSN(
	ctx context.Context, s *recoveryState, known *notes, top outbox.Position, end outbox.LSN,
) error {
	tail := s.found.Tail.Position
	comparable := s.found.HasTail && r.sys.Comparable(tail)
	// The passed LSN does not tell: it need not have been flushed, and a crash may have taken it back.
	if comparable && tail.Commit > end {
		comparable = false
		r.alarm(alarm.ServerRolledBack, zap.Stringer("position", tail), zap.Stringer("insert_lsn", end))
	}
	if comparable {
		s.tail = top
		s.recoveryLSN = max(top.Commit, top.Passed)
	}
	// The WAL may bring the first insert of a dead letter again, which is no row any
	// more and no message.
	died, err := r.db.DiedLately(ctx, r.cfg.Slot)
	if err != nil {
		return err
	}
	others, err := r.othersMarked(ctx, known)
	if !comparable || s.found.Beyond || died || others {
		s.recoveryLSN = end
	}
	return err
}

// othersMarked reports whether a row was marked after this relay had ended. The WAL may bring rows that
// another one has delivered meanwhile.
func (r *recovery) othersMarked(ctx context.Context, known *notes) (bool, error) {
	if known.meanwhile { // their rows may have been archived since
		return true, nil
	}
	for _, t := range r.outboxes {
		n := known.of[t]
		if n == nil || n.endedAt.IsZero() {
			continue
		}
		since := n.endedAt.Add(time.Microsecond)
		marked, err := r.db.MarkedSince(ctx, t, since, &table.MarkCursor{}, 1)
		if err != nil || len(marked) > 0 {
			return len(marked) > 0, err
		}
	}
	return false, nil
}
