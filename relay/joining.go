package relay

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// An outbox joins a slot that is there already: one that was added to the configuration, or put back, or to
// the publication. The slot has only its later rows, and those would overtake the earlier ones. So its rows
// are left to the table first, while the others stream. When nothing is left from before a moment from which
// the slot keeps the WAL, the next session takes them from there.

// leave leaves an outbox to the table from now on, which the publication has by that: "" where by nothing, so
// that the WAL has no rows of it either.
func (s *session) leave(t *outbox.Table, as string) { s.left.Store(t, as) }

// leaves reports whether an outbox is left to the table, and by what the publication has it.
func (s *session) leaves(t *outbox.Table) (as string, leaves bool) {
	v, leaves := s.left.Load(t)
	as, _ = v.(string)
	return as, leaves
}

func (s *servers) newMembership() stream.Membership {
	return stream.Membership{Publication: s.cfg.Publication, Tables: s.outboxes}
}

// membership reads how the publication has the outboxes.
func (s *session) membership(ctx context.Context) (*stream.Membership, error) {
	m := s.newMembership()
	return &m, s.db.Use(ctx, m.Take)
}

// lookAtPublication looks before anything is decided by it. Where that fails, outboxes with a filter are left
// to the table until watchFacts has looked.
func (s *session) lookAtPublication(ctx context.Context) {
	if err := s.past.published.check(ctx, s.db); err != nil {
		s.trouble("the publication cannot be looked at: trying again", err)
	}
}

// as is by what the publication has an outbox, "" where its rows are left to the table.
func (s *session) as(t *outbox.Table, now *stream.Membership) string {
	return s.past.published.last.Load().As(t, now)
}

// outbox is the one that a row of outbox_sent is of.
func (s *servers) outbox(of *table.Sent) *outbox.Table {
	return s.outboxes[slices.IndexFunc(s.outboxes, func(t *outbox.Table) bool {
		return t.String() == of.Outbox
	})]
}

// leaveOut compares how the publication has the outboxes with what was noted when they joined. One that has
// nothing pending joins at once. Where there is no table outbox_sent, nothing is known, and none is left out.
func (s *session) leaveOut(ctx context.Context) error {
	now, err := s.membership(ctx)
	if err != nil {
		return err
	}
	for i := range s.noter.rows {
		sent := &s.noter.rows[i]
		switch as := s.as(s.outbox(sent), now); {
		case as == "":
			err = s.unpublished(ctx, sent)
		case as != sent.PublishedAs:
			err = s.joinOrLeave(ctx, sent, as)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unpublished leaves out an outbox that the publication does not have any more as it should.
func (s *session) unpublished(ctx context.Context, sent *table.Sent) error {
	s.leave(s.outbox(sent), "")
	if sent.PublishedAs == "" {
		return nil
	}
	void := *sent
	void.PublishedAs = ""
	return s.db.NotePublished(ctx, []table.Sent{void})
}

// joinOrLeave has an outbox join where nothing is pending.
func (s *session) joinOrLeave(ctx context.Context, sent *table.Sent, as string) error {
	t := s.outbox(sent)
	xid, err := s.db.NewXID(ctx)
	if err != nil {
		return err
	}
	joins, err := s.db.EndedBefore(ctx, xid)
	if err == nil && joins {
		var fresh []table.Candidate
		fresh, err = s.db.Fresh(ctx, t, s.cfg.DelayThreshold, 1)
		joins = len(fresh) == 0
	}
	if err != nil && !waitsOut(err) {
		return err
	}
	if err != nil || !joins {
		s.leave(t, as)
		return nil
	}
	sent.PublishedAs = as
	if err := s.db.NotePublished(ctx, []table.Sent{*sent}); err != nil {
		return err
	}
	// The WAL may have rows that others have delivered.
	s.recovered.recoveryLSN, err = s.db.InsertLSN(ctx)
	return err
}

// checkPublished ends the session where the publication has an outbox by something else than when it began.
// One that it does not have any more keeps no other one waiting. watchFacts calls it, and the reader by
// readPublished.
func (s *session) checkPublished(ctx context.Context, now *stream.Membership) error {
	for _, sent := range s.noter.rows {
		t := s.outbox(&sent)
		before, left := s.leaves(t)
		if !left {
			before = sent.PublishedAs
		}
		switch as := s.as(t, now); as {
		case before:
		case "":
			if err := s.unpublished(ctx, &sent); err != nil {
				return err
			}
		default:
			return fmt.Errorf("%w: publication %s has %s in another way",
				errModeChanged, s.cfg.Publication, t)
		}
	}
	return nil
}

// readPublished is checkPublished of what the publication has now.
func (s *session) readPublished(ctx context.Context) error {
	now, err := s.membership(ctx)
	if err != nil {
		return err
	}
	return s.checkPublished(ctx, now)
}

// So long the slot keeps WAL for an outbox that joins, the first time and at most.
const (
	pinLeast = 10 * time.Second
	pinMost  = 10 * time.Minute
)

// join has each outbox join that is left to the table, until one has: that ends the session.
func (s *session) join(ctx context.Context) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var joining sync.WaitGroup
	for _, row := range s.noter.rows {
		if as, _ := s.leaves(s.outbox(&row)); as != "" {
			row.PublishedAs = as
			joining.Go(func() {
				if err := s.joinOne(ctx, row); err != nil {
					stop(err)
				}
			})
		}
	}
	joining.Wait()
	return context.Cause(ctx)
}

// joinOne returns when the slot brings all later rows of an outbox.
func (s *session) joinOne(ctx context.Context, sent table.Sent) error {
	t := s.outbox(&sent)
	s.log.Info("an outbox joins: its rows are delivered from the table first", zapTable(t))
	const step = "deliver what the slot does not have of an outbox that joins"
	for limit := pinLeast; ; limit = min(2*limit, pinMost) {
		if err := s.poller.Answer(ctx, step, t); err != nil {
			return err
		}
		// Now it is quick, unless a transaction is open, or a row locked, for long.
		release := s.wal.Tracker().Pin()
		pinned, cancel := context.WithTimeout(ctx, limit)
		err := s.poller.Answer(pinned, step, t)
		late := pinned.Err() != nil && ctx.Err() == nil
		cancel()
		if err == nil {
			break
		}
		if !late {
			return err
		}
		release()
	}
	if err := s.readPublished(ctx); err != nil {
		return err
	}
	if as, _ := s.leaves(t); as != sent.PublishedAs { // it is not published any more
		return nil
	}
	if err := s.db.NotePublished(ctx, []table.Sent{sent}); err != nil {
		return err
	}
	return fmt.Errorf("%w: %s has joined, its rows come from the WAL", errModeChanged, t)
}
