package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

const (
	// factsEvery is the time between two looks at the tables, the publication and the stream.
	factsEvery = 3 * time.Second
	// factsAgain is the time after which an alarm about them comes again.
	factsAgain = 10 * time.Minute
)

// An outbox is set aside while its table does not fit, or while a question about it is open. To the others it
// is one that the configuration does not name. When it fits again it joins, as one does that was added.

// readTables reads the facts of the tables that statements are made of, and says which outboxes are
// delivered. It writes them, so it runs before any goroutine of the term that reads a table.
func (l *leader) readTables(ctx context.Context, db *table.DB) error {
	l.outboxes, l.aside = nil, nil
	for _, t := range l.cfg.Outboxes {
		now, unfit, err := l.inspect(ctx, l.reporter, db, t)
		if err != nil {
			return err
		}
		*t = now
		if unfit != nil {
			l.aside = append(l.aside, SetAside{t.String(), unfit.Error(), hint.Of(unfit)})
			continue
		}
		l.outboxes = append(l.outboxes, t)
		if t.Known != t.FirstName() && !l.limited("known/"+t.Known, math.MaxInt64) {
			l.log.Info("the outbox is known by another name than its table's", zapTable(t),
				zap.String("relation", t.Relation()))
		}
	}
	l.status.setAside(l.aside)
	return nil
}

// compareTables returns ErrTableChanged where a table is not as readTables found it: the term ends with it.
// What outbox_known says of the table is what it is now.
func (s *servers) compareTables(ctx context.Context, p *reporter, db *table.DB) error {
	for _, t := range s.cfg.Outboxes {
		now, unfit, err := s.inspect(ctx, p, db, t)
		delivered := slices.Contains(s.outboxes, t)
		switch {
		case err != nil:
			return err
		case unfit != nil && delivered:
			return fmt.Errorf("%w: %w", table.ErrTableChanged, unfit)
		case unfit == nil && !delivered, delivered && now != *t:
			return fmt.Errorf("%w: %s", table.ErrTableChanged, t)
		case delivered:
			if err := db.Know(ctx, t, s.defaultSource); err != nil {
				return err
			}
		}
	}
	return nil
}

// becauseOf returns ErrTableChanged where a table is why the server refused a statement, or the WAL brought
// a row that does not fit.
func (l *leader) becauseOf(ctx context.Context, db *table.DB, failure error) error {
	if pg.InClass(failure, pg.SyntaxErrorOrAccessRule) || errors.Is(failure, stream.ErrUndecodable) {
		err := l.compareTables(ctx, l.reporter, db)
		if errors.Is(err, table.ErrTableChanged) {
			return fmt.Errorf("%w: %w", err, failure)
		}
	}
	return failure
}

// inspect returns a table as it is now, and why its outbox is set aside. It raises an alarm where a table is
// not as a start wants it.
func (s *servers) inspect(
	ctx context.Context, p *reporter, db *table.DB, t *outbox.Table,
) (now outbox.Table, unfit, err error) {
	delivered := slices.Contains(s.outboxes, t)
	waits := delivered || len(s.cfg.Outboxes) == 1 // for a lock; no other outbox does
	now, problems, err := db.Inspect(ctx, t)
	unfit = problems.Own().FirstError()
	if waits && table.IsLocked(unfit) {
		return now, nil, unfit
	}
	if err == nil && unfit == nil && !delivered {
		if !waits {
			err = db.Reach(ctx, t)
		}
		if err == nil {
			err = s.question(ctx, db, &now)
		}
		if isQuestion(err) || !waits && table.IsLocked(err) {
			problems.Failed(check.Error, "table-unreadable", err)
			unfit, err = err, nil
		}
	}
	kind := "table_unfit/" + t.Relation() + "/"
	wrong := problems.FirstError()
	if wrong == nil && err == nil {
		p.over(kind, alarm.TableUnfit, zapTable(t))
	}
	if wrong != nil && !p.limited(kind+hint.CodeOf(wrong), factsAgain) {
		p.alarm(alarm.TableUnfit, append(why(wrong), zapTable(t))...)
	}
	return now, unfit, err
}

// errStreamUnfit means that the stream was changed into one that a start refuses.
var errStreamUnfit = errors.New("the stream was changed")

// judgeStream raises an alarm where the stream is not as a start wants it. Nothing is sent until it is:
// what such a stream acknowledges may not be there.
func (s *session) judgeStream(info *jetstream.StreamInfo) error {
	findings, err := s.stream.Judge(info)
	s.sayWeaknesses(findings)
	if err == nil {
		return nil
	}
	if !s.limited("stream_unfit", factsAgain) {
		s.alarm(alarm.StreamUnfit, why(err)...)
	}
	return fmt.Errorf("%w: %w", errStreamUnfit, err)
}

// errStreamReplaced means that the stream was deleted and recreated since the session began. The next session
// compares it with the tables.
var errStreamReplaced = errors.New("the stream was deleted and recreated")

// errStreamLost means that the stream ends before a message that was acknowledged: it has lost that, or
// another client has acknowledged it. The next session compares marks with the stream.
var errStreamLost = errors.New("the stream lacks acknowledged messages")

// checkStream returns what ends the session: the stream is gone, is another one, is unfit, or ends before
// what was acknowledged. Where JetStream is away, the publisher notices. A relay without events notices that
// only here.
func (s *session) checkStream(ctx context.Context) error {
	acknowledged := s.publisher.LastSeq()
	info, err := s.stream.Info(ctx)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return err
	case err != nil:
		return nil
	case !info.Created.Equal(s.past.created):
		return errStreamReplaced
	case info.LastSeq < acknowledged:
		return fmt.Errorf("%w: it ends at sequence %d, and %d was acknowledged",
			errStreamLost, info.LastSeq, acknowledged)
	case s.transformed != (info.Config.SubjectTransform != nil):
		// What is stored from now on has other subjects.
		return fmt.Errorf("%w: the stream got a subject transform, or lost it", errModeChanged)
	}
	return s.judgeStream(info)
}

// watchFacts looks at the tables, the publication and the stream again and again, and returns what ends
// the session.
func (s *session) watchFacts(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.altered:
		case <-time.After(factsEvery):
		}
		err := s.lookAgain(ctx)
		switch {
		case ctx.Err() != nil || !s.db.Alive():
			return nil
		case err != nil && failureOf(inCheck, err).outcome != waitOut:
			return err
		case err != nil:
			s.trouble("the tables and the publication cannot be looked at: trying again", err)
		}
	}
}

func (s *session) lookAgain(ctx context.Context) error {
	if err := s.checkStream(ctx); err != nil {
		return err
	}
	if err := s.noticeAwaiting(ctx); err != nil {
		return err
	}
	if err := s.compareTables(ctx, s.reporter, s.db); err != nil || s.wal == nil {
		return err
	}
	if err := s.past.published.check(ctx, s.db); err != nil {
		return err
	}
	return s.checkPublished(ctx, &s.past.published.last.Load().Membership)
}

// published knows whether the publication brings every row, and no others. A session's start and then its
// watchFacts look, one session after the other.
type published struct {
	reporter *reporter
	servers  *servers
	last     atomic.Pointer[stream.PublicationLook]
}

// check raises an alarm where the publication leaves out rows, or brings others.
func (p *published) check(ctx context.Context, db *table.DB) error {
	look := stream.PublicationLook{
		Membership: p.servers.newMembership(), Before: p.last.Load(),
	}
	if err := db.Use(ctx, look.Take); err != nil {
		return err
	}
	p.last.Store(&look)
	problem := look.Problem()
	if problem == nil {
		p.reporter.over("unpublished/", alarm.Unpublished)
		return nil
	}
	if !p.reporter.limited("unpublished/"+problem.Error(), factsAgain) {
		p.reporter.alarm(alarm.Unpublished, why(problem)...)
	}
	return nil
}
