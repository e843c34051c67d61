package relay

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// An outbox joins a slot that is there already: one that was added to the configuration, or put back, or to
// the publication. The slot has only its later rows, and those would overtake the earlier ones. So its rows
// are left to the table first, while the others stream. When nothing is left from before a moment from which
// the slot keeps the WAL, the next session takes them from there.

// leftOut has the outboxes of a session that reads the WAL whose rows are left to the table, and by what the
// publication has each: "" where by nothing, so that the WAL has no rows of it either.
type leftOut map[*outbox.Table]string

// leave leaves an outbox to the table from now on.
func (s *session) leave(t *outbox.Table, as string) {
	for {
		before := s.left.Load()
		left := leftOut{t: as}
		if before != nil {
			left = maps.Clone(*before)
			left[t] = as
		}
		if s.left.CompareAndSwap(before, &left) {
			return
		}
	}
}

// leaves reports whether an outbox is left to the table, and by what the publication has it.
func (s *session) leaves(t *outbox.Table) (as string, leaves bool) {
	if left := s.left.Load(); left != nil {
		as, leaves = (*left)[t]
	}
	return as, leaves
}

// published returns rows of outbox_sent with what the publication has their tables by now.
func (s *session) published(ctx context.Context, rows []table.Sent) ([]table.Sent, error) {
	look := stream.Published{Publication: s.cfg.Publication, Tables: s.cfg.Outboxes}
	if err := s.db.Use(ctx, look.Take); err != nil {
		return nil, err
	}
	now := slices.Clone(rows)
	for i := range now {
		now[i].PublishedAs = look.As[s.outbox(&now[i])]
	}
	return now, nil
}

// outbox is the one that a row of outbox_sent is of.
func (s *servers) outbox(of *table.Sent) *outbox.Table {
	return s.cfg.Outboxes[slices.IndexFunc(s.cfg.Outboxes, func(t *outbox.Table) bool {
		return t.String() == of.Outbox
	})]
}

// leaveOut compares how the publication has the outboxes with what was noted when they joined. One that has
// nothing pending joins at once. Where there is no table outbox_sent, nothing is known, and none is left out.
func (s *session) leaveOut(ctx context.Context) error {
	now, err := s.published(ctx, s.noter.rows)
	if err != nil {
		return err
	}
	xid, err := s.db.NewXID(ctx)
	if err != nil {
		return err
	}
	for i := range now {
		sent := &s.noter.rows[i]
		switch as := now[i].PublishedAs; {
		case as == "":
			err = s.unpublished(ctx, sent)
		case as != sent.PublishedAs:
			err = s.joinOrLeave(ctx, sent, as, xid)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// unpublished leaves out an outbox that the publication does not have any more.
func (s *session) unpublished(ctx context.Context, sent *table.Sent) error {
	s.leave(s.outbox(sent), "")
	if sent.PublishedAs == "" {
		return nil
	}
	void := *sent
	void.PublishedAs = ""
	return s.db.NotePublished(ctx, []table.Sent{void})
}

// joinOrLeave has an outbox join where nothing is pending that was written before xid was taken.
func (s *session) joinOrLeave(ctx context.Context, sent *table.Sent, as string, xid int64) error {
	t := s.outbox(sent)
	left, err := s.db.FreshBefore(ctx, t, s.cfg.DelayThreshold, xid)
	if err != nil && !waitsOut(err) {
		return err
	}
	if err != nil || left != "" {
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
// One that it does not have any more keeps no other one waiting. The reader calls it, and watchFacts.
func (s *session) checkPublished(ctx context.Context) error {
	now, err := s.published(ctx, s.noter.rows)
	if err != nil {
		return err
	}
	for i, sent := range s.noter.rows {
		t := s.outbox(&sent)
		before, left := s.leaves(t)
		if !left {
			before = sent.PublishedAs
		}
		switch as := now[i].PublishedAs; as {
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

// join ends the session when the slot brings all later rows of the outboxes that join.
func (s *session) join(ctx context.Context) error {
	var join []*outbox.Table
	var sent []table.Sent
	for _, row := range s.noter.rows {
		t := s.outbox(&row)
		if row.PublishedAs, _ = s.leaves(t); row.PublishedAs != "" {
			join, sent = append(join, t), append(sent, row)
		}
	}
	if len(join) == 0 {
		return nil
	}
	names := make([]string, len(join))
	for i, t := range join {
		names[i] = t.String()
	}
	s.log.Info("outboxes join: their rows are delivered from the table first", zap.Strings("tables", names))
	// The first time without the slot keeping anything, which may take long.
	const step = "deliver what the slot does not have of outboxes that join"
	if err := s.poller.Answer(ctx, step, join...); err != nil {
		return err
	}
	s.wal.Tracker().Begin() // nothing that is received from now on is confirmed
	if err := s.poller.Answer(ctx, step, join...); err != nil {
		return err
	}
	if err := s.checkPublished(ctx); err != nil {
		return err
	}
	sent = slices.DeleteFunc(sent, func(row table.Sent) bool {
		as, _ := s.leaves(s.outbox(&row))
		return as != row.PublishedAs
	})
	if err := s.db.NotePublished(ctx, sent); err != nil {
		return err
	}
	return fmt.Errorf("%w: outboxes have joined: their rows come from the WAL", errModeChanged)
}
