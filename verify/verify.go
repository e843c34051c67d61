// Package verify compares outboxes with the stream that they were relayed into, by
// message id: whether everything is there, once, in its order, and nothing else.
//
// It runs beside a relay. Whatever looks wrong at first is looked at again, when
// the other side has had the time to catch up.
package verify

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"slices"
	"strconv"
	"time"

	"github.com/RoaringBitmap/roaring/v2/roaring64"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

const (
	// batch is how many rows are looked for at once.
	batch = 1000
	// suspectRows is how many rows that look missing are looked at again together.
	suspectRows = 10_000
	// remembered bounds each list that has to be kept exactly: messages without a
	// row, and message ids that came twice.
	remembered = 200_000
	// aggregatesMost bounds the aggregates whose order is followed.
	aggregatesMost = 4_000_000
	// proofPatience is how long the relay may take to confirm what was written when
	// pending rows were found.
	proofPatience = 20 * time.Second
)

// Config says what is compared.
type Config struct {
	Postgres fallback.Config
	Slot     string
	Outboxes []*outbox.Table
	Stream   *publish.Stream
	Source   string // of the message ids
	// Phantom tells positions of WAL that the server never had; nil where that is not
	// known.
	Phantom func(outbox.Position) bool
	// Since limits the comparison to the newest messages and marks; 0 is everything.
	Since time.Duration
	// KeptFor is how long after its mark a row is in the table or the archive; 0 is
	// for ever. Messages that are older may have no row.
	KeptFor time.Duration
	// Repair makes missing rows pending again: the running relay delivers them.
	Repair bool
	// Progress, where it is set, is told how far the reading of the stream is.
	Progress func(done, total uint64)
}

// Run compares. It needs about two bytes for each row with a numeric id that was
// stored (less where ids are dense), ten for others, and 40 for each aggregate.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	db, err := fallback.Open(ctx, cfg.Postgres)
	if err != nil {
		return nil, err
	}
	defer db.Close()
	if err := db.Unbind(ctx); err != nil {
		return nil, err
	}
	v := &comparison{
		cfg: cfg, db: db, report: newReport(), tables: map[string]*table{}, order: map[uint64]place{}, seed: maphash.MakeSeed(),
		twice: map[string]struct{}{},
	}
	for _, t := range cfg.Outboxes {
		if err := db.CheckTable(ctx, t); err != nil {
			return nil, err
		}
		v.tables[t.String()] = &table{Table: t, seen: roaring64.New()}
	}
	if err := v.run(ctx); err != nil {
		return v.report, err
	}
	return v.report, nil
}

type comparison struct {
	cfg    Config
	db     *fallback.DB
	report *Report
	tables map[string]*table
	// oldest is the stream's first message when it began, first the first that was
	// read, next the one after the last.
	oldest, first, next uint64
	since               time.Time // the database's clock
	order               map[uint64]place
	seed                maphash.Seed
	strangers           []publish.Message   // without a row, so far
	twice               map[string]struct{} // message ids of rows that were met more than once
}

type table struct {
	*outbox.Table
	seen *roaring64.Bitmap // keys of the rows that the stream has
}

// place is where the newest messages of an aggregate come from.
type place struct {
	wal, polled spot
}

type spot struct {
	timeline uint32
	n        uint32
	commit   outbox.LSN
	seq      uint64
}

// key is a row's id as a number, or a hash of it.
func key(id string) uint64 {
	if n, err := strconv.ParseInt(id, 10, 64); err == nil {
		return uint64(n)
	}
	return outbox.HashText([]byte(id), 0)
}

func (v *comparison) run(ctx context.Context) error {
	started, err := v.db.Now(ctx)
	if err != nil {
		return err
	}
	info, err := v.cfg.Stream.Info(ctx)
	if err != nil {
		return err
	}
	v.oldest, v.first, v.next = info.FirstSeq, info.FirstSeq, info.FirstSeq
	if v.cfg.Since > 0 {
		v.since = started.Add(-v.cfg.Since)
		from, err := v.cfg.Stream.SeqSince(ctx, time.Now().Add(-v.cfg.Since))
		if err != nil {
			return err
		}
		v.first = max(v.first, from)
		v.next = v.first
	}
	v.report.FirstSeq = v.first
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	for _, t := range v.cfg.Outboxes {
		if err := v.rows(ctx, v.tables[t.String()], started); err != nil {
			return err
		}
	}
	if err := v.judgePending(ctx); err != nil {
		return err
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	if err := v.judgeTwice(ctx); err != nil {
		return err
	}
	v.report.LastSeq = v.next - 1
	return v.judgeStrangers(ctx, started)
}

func (v *comparison) note(format string, args ...any) {
	if s := fmt.Sprintf(format, args...); !slices.Contains(v.report.Notes, s) {
		v.report.Notes = append(v.report.Notes, s)
	}
}

// catchUp reads the stream up to its present end.
func (v *comparison) catchUp(ctx context.Context) error {
	info, err := v.cfg.Stream.Info(ctx)
	if err != nil || info.LastSeq < v.next {
		return err
	}
	last := info.LastSeq
	err = v.cfg.Stream.ReadOn(ctx, v.next, last, publish.ReadBackOptions{
		Source: v.cfg.Source, Aggregates: true,
		Step: func(messages []publish.Message) (bool, error) {
			if n := len(messages); n > 0 && v.cfg.Progress != nil {
				v.cfg.Progress(messages[n-1].Seq-v.first+1, last-v.first+1)
			}
			return true, v.each(ctx, messages, v.message)
		},
	})
	if err == nil {
		v.next = last + 1
	}
	return err
}

// each looks for the rows of messages, and calls do in the messages' order, table by
// table.
func (v *comparison) each(ctx context.Context, messages []publish.Message, do func(*table, publish.Message, fallback.Finding)) error {
	for part := range slices.Chunk(messages, batch) {
		byTable := map[*table][]publish.Message{}
		for _, m := range part {
			t := v.tables[m.ID.Table]
			if t == nil {
				v.note("messages of table %s are not compared: it is none of outboxes", m.ID.Table)
				continue
			}
			byTable[t] = append(byTable[t], m)
		}
		for t, ms := range byTable {
			refs := make([]outbox.Ref, len(ms))
			for i, m := range ms {
				refs[i] = outbox.Ref{Table: t.Table, ID: m.ID.ID, Hash: m.ID.Hash}
			}
			found, err := v.db.Find(ctx, t.Table, refs)
			if err != nil {
				return err
			}
			for i, m := range ms {
				do(t, m, found[i])
			}
		}
	}
	return nil
}

func row(m publish.Message) string { return m.ID.Table + "/" + m.ID.ID }

// message takes one message, in the stream's order.
func (v *comparison) message(t *table, m publish.Message, f fallback.Finding) {
	v.report.Messages++
	switch {
	case m.ID.Replay:
		v.report.Replays++
		return
	case v.cfg.Phantom != nil && !m.Polled && v.cfg.Phantom(m.Position):
		v.report.add(Phantom, Case{Row: row(m), Seq: m.Seq, Detail: m.Position.String()})
		return
	case f.Place == fallback.Nowhere && t.Mark == outbox.MarkUpdate:
		if len(v.strangers) < remembered {
			v.strangers = append(v.strangers, m)
		} else {
			v.note("more than %d messages have no row: only so many were looked at", remembered)
		}
		return
	}
	if !t.seen.CheckedAdd(key(m.ID.ID)) {
		v.again(t, m)
	}
	if m.Aggregate == "" {
		m.Aggregate = f.Aggregate
	}
	v.follow(m)
}

// again notes a row that came before, perhaps as another message: ids come again.
func (v *comparison) again(t *table, m publish.Message) {
	if len(v.twice) >= remembered {
		v.note("more than %d rows came more than once: only so many were looked at", remembered)
		return
	}
	v.twice[t.String()+"/"+m.ID.ID] = struct{}{}
}

// follow checks the order of an aggregate.
func (v *comparison) follow(m publish.Message) {
	if m.Aggregate == "" || m.Position.SystemID == "" {
		return
	}
	id := maphash.String(v.seed, m.ID.Table+"/"+m.Aggregate)
	p, known := v.order[id]
	if !known && len(v.order) >= aggregatesMost {
		v.note("there are more than %d aggregates: the order of the others was not compared", aggregatesMost)
		return
	}
	now := spot{m.Position.Timeline, m.Position.N, m.Position.Commit, m.Seq}
	last := &p.wal
	if m.Polled {
		last = &p.polled
	}
	if last.seq > 0 && now.before(*last, m.Polled) {
		v.report.add(Reordered, Case{Row: row(m), Seq: m.Seq, Detail: fmt.Sprintf("%s, behind sequence %d at %s/%d", m.Position, last.seq, last.commit, last.n)})
	} else {
		*last = now
	}
	v.order[id] = p
}

// before compares places on one timeline. The poller's messages repeat the lane's.
func (s spot) before(other spot, polled bool) bool {
	if s.timeline != other.timeline {
		return s.timeline < other.timeline
	}
	if s.commit != other.commit {
		return s.commit < other.commit
	}
	return !polled && s.n <= other.n
}

// rows looks in the stream for every row that is marked as stored.
func (v *comparison) rows(ctx context.Context, t *table, started time.Time) error {
	if t.Mark != outbox.MarkUpdate {
		v.note("%s: with mark %s stored rows are gone: nothing tells which messages should be there", t, t.Mark)
		return nil
	}
	var suspects []outbox.Ref
	// The outbox first: rows move to the archive and not back.
	for _, walk := range []func(context.Context, *outbox.Table, time.Time, *fallback.MarkCursor, int) ([]outbox.Ref, error){v.db.MarkedSince, v.db.ArchivedSince} {
		var cursor fallback.MarkCursor
		for {
			refs, err := walk(ctx, t.Table, v.since, &cursor, batch)
			if err != nil {
				return err
			}
			v.report.Rows += int64(len(refs))
			for _, ref := range refs {
				if !t.seen.Contains(key(ref.ID)) {
					suspects = append(suspects, ref)
				}
			}
			if len(suspects) >= suspectRows {
				if err := v.judgeMissing(ctx, t, suspects); err != nil {
					return err
				}
				suspects = suspects[:0]
			}
			if len(refs) < batch || cursor.At().After(started) {
				break
			}
		}
	}
	return v.judgeMissing(ctx, t, suspects)
}

// judgeMissing looks again for rows that were not in the stream. They were marked
// when they were listed, so a message of theirs is in the stream by now.
func (v *comparison) judgeMissing(ctx context.Context, t *table, suspects []outbox.Ref) error {
	if len(suspects) == 0 {
		return nil
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	suspects = v.unseen(t, suspects)
	// A row may have been marked long after it was stored.
	for span := uint64(publish.U); len(suspects) > 0 && v.first > v.oldest; span *= 2 {
		from := max(v.oldest, v.first-min(span, v.first))
		if err := v.lookBack(ctx, from); err != nil {
			return err
		}
		suspects = v.unseen(t, suspects)
	}
	found, err := v.db.Find(ctx, t.Table, suspects)
	if err != nil {
		return err
	}
	var marked, archived []outbox.Ref
	for i, f := range found {
		switch f.Place {
		case fallback.Marked:
			marked = append(marked, suspects[i])
		case fallback.Archived:
			archived = append(archived, suspects[i])
		default:
			continue // it has moved on
		}
		v.report.add(Missing, Case{Row: suspects[i].String(), Detail: "marked as stored"})
	}
	if !v.cfg.Repair {
		return nil
	}
	return v.repair(ctx, t, marked, archived)
}

func (v *comparison) unseen(t *table, refs []outbox.Ref) []outbox.Ref {
	return slices.DeleteFunc(refs, func(ref outbox.Ref) bool { return t.seen.Contains(key(ref.ID)) })
}

// lookBack reads messages from before the window, only to know that they are there.
func (v *comparison) lookBack(ctx context.Context, from uint64) error {
	err := v.cfg.Stream.ReadOn(ctx, from, v.first-1, publish.ReadBackOptions{
		Source: v.cfg.Source,
		Step: func(messages []publish.Message) (bool, error) {
			return true, v.each(ctx, messages, func(t *table, m publish.Message, f fallback.Finding) {
				if !m.ID.Replay && (f.Place != fallback.Nowhere || t.Mark != outbox.MarkUpdate) {
					t.seen.Add(key(m.ID.ID))
				}
			})
		},
	})
	v.first = from
	return err
}

func (v *comparison) repair(ctx context.Context, t *table, marked, archived []outbox.Ref) error {
	for part := range slices.Chunk(marked, batch) {
		locked, err := v.db.Unmark(ctx, t.Table, part)
		if err != nil {
			return err
		}
		v.report.Repaired += int64(len(part) - len(locked))
		if len(locked) > 0 {
			v.note("rows of %s are locked by another session and were not repaired: run it again", t)
		}
	}
	for part := range slices.Chunk(archived, batch) {
		n, err := v.db.Return(ctx, t.Table, part)
		if err != nil {
			return err
		}
		v.report.Repaired += int64(n)
		if n < len(part) {
			v.note("archived rows of %s have ids that are in the outbox again, and were not repaired", t)
		}
	}
	return nil
}

// judgePending proves of pending rows that nobody will deliver them from the WAL:
// the relay has confirmed everything that was written when they had been found.
func (v *comparison) judgePending(ctx context.Context) error {
	pending := map[*table][]string{}
	for _, t := range v.tables {
		if t.Mark == outbox.MarkNone {
			continue
		}
		due, err := v.db.Fresh(ctx, t.Table, time.Second, suspectRows)
		if err != nil {
			return err
		}
		for _, c := range due {
			if !c.Early && !c.Scheduled {
				pending[t] = append(pending[t], c.ID)
			}
		}
	}
	if len(pending) == 0 {
		return nil
	}
	proven, err := v.proven(ctx)
	if err != nil {
		return err
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	for t, ids := range pending {
		for part := range slices.Chunk(ids, batch) {
			rows, more, err := v.db.Fetch(ctx, t.Table, part) // those that nobody has locked
			if err != nil {
				return err
			}
			if more {
				v.note("large pending rows of %s were not all looked at", t)
			}
			for _, ev := range rows {
				switch {
				case ev.Values[outbox.LastError] != nil || t.seen.Contains(key(string(ev.Values[outbox.ID]))):
				case !proven:
					v.report.Pending++
				default:
					v.report.add(Missing, Case{Row: ev.Ref().String(), Detail: "pending, and the WAL is past it: the relay's next search of the table delivers it"})
				}
			}
		}
	}
	return nil
}

func (v *comparison) proven(ctx context.Context) (bool, error) {
	end, err := v.db.InsertLSN(ctx)
	if err != nil {
		return false, err
	}
	if err := v.db.Flush(ctx); err != nil {
		return false, err
	}
	for until := time.Now().Add(proofPatience); ; {
		confirmed, active, err := v.db.Confirmed(ctx, v.cfg.Slot)
		switch {
		case err != nil:
			return false, err
		case confirmed >= end:
			return true, nil
		case !active:
			v.note("nobody streams slot %q: whether pending rows should be stored by now cannot be told", v.cfg.Slot)
			return false, nil
		case time.Now().After(until):
			v.note("the relay has not confirmed within %s what was written: whether pending rows should be stored by now cannot be told", proofPatience)
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// judgeTwice reads the stream again where rows came more than once, and compares
// whole message ids.
func (v *comparison) judgeTwice(ctx context.Context) error {
	if len(v.twice) == 0 {
		return nil
	}
	first := map[outbox.MessageID]uint64{}
	return v.cfg.Stream.ReadOn(ctx, v.first, v.next-1, publish.ReadBackOptions{
		Source: v.cfg.Source,
		Step: func(messages []publish.Message) (bool, error) {
			for _, m := range messages {
				if _, suspect := v.twice[row(m)]; !suspect || m.ID.Replay {
					continue
				}
				if seq := first[m.ID]; seq > 0 {
					v.report.add(Duplicated, Case{Row: row(m), Seq: m.Seq, Detail: fmt.Sprintf("it is at sequence %d already", seq)})
					continue
				}
				first[m.ID] = m.Seq
			}
			return true, ctx.Err()
		},
	})
}

// judgeStrangers looks again for the rows of messages that had none: a message may be
// there before its row is visible.
func (v *comparison) judgeStrangers(ctx context.Context, started time.Time) error {
	if len(v.strangers) == 0 {
		return nil
	}
	if now, err := v.db.Now(ctx); err != nil {
		return err
	} else if now.Sub(started) < time.Second {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
	seen := map[outbox.MessageID]uint64{}
	old := 0
	err := v.each(ctx, v.strangers, func(t *table, m publish.Message, f fallback.Finding) {
		if seq := seen[m.ID]; seq > 0 {
			v.report.add(Duplicated, Case{Row: row(m), Seq: m.Seq, Detail: fmt.Sprintf("it is at sequence %d already", seq)})
		} else {
			seen[m.ID] = m.Seq
		}
		switch {
		case f.Place != fallback.Nowhere:
		case v.cfg.KeptFor > 0 && time.Since(m.Stored) > v.cfg.KeptFor:
			old++
		default:
			v.report.add(Unknown, Case{Row: row(m), Seq: m.Seq})
		}
	})
	if old > 0 {
		v.note("%d messages are older than the rows that are kept: they have none any more", old)
	}
	return errors.Join(err, ctx.Err())
}
