package relay

import (
	"context"
	"errors"
	"fmt"
	"math"
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

// readTables reads the facts of the tables that statements are made of. It writes them, so it runs before
// any goroutine of the term that reads a table.
func readTables(ctx context.Context, p *reporter, db *table.DB, tables []*outbox.Table) error {
	for _, t := range tables {
		now, _, err := inspect(ctx, p, db, t)
		if err != nil {
			return err
		}
		if *t = now; t.Known != t.FirstName() && !p.limited("known/"+t.Known, math.MaxInt64) {
			p.log.Info("the outbox is known by another name than its table's", zapTable(t),
				zap.String("relation", t.Relation()))
		}
	}
	return nil
}

// compareTables returns ErrTableChanged where a table is not as readTables found it: the term ends with it.
// What outbox_known says of the table is what it is now. unfit is what a start would refuse a table for.
func (s *servers) compareTables(ctx context.Context, p *reporter, db *table.DB) (unfit, err error) {
	for _, t := range s.cfg.Outboxes {
		now, cause, err := inspect(ctx, p, db, t)
		if err == nil && now != *t {
			err = fmt.Errorf("%w: %s", table.ErrTableChanged, t)
		}
		if err == nil {
			err = db.Know(ctx, t, s.defaultSource)
		}
		if err != nil {
			return nil, err
		}
		if unfit == nil {
			unfit = cause
		}
	}
	return unfit, nil
}

// becauseOf puts what is wrong with a table before the server's refusal of a statement (SQLSTATE class 42).
func becauseOf(unfit, err error) error {
	if unfit == nil || !pg.InClass(err, pg.SyntaxErrorOrAccessRule) {
		return err
	}
	return fmt.Errorf("%w: %w", unfit, err)
}

// inspect raises an alarm where a table is not as a start wants it. The relay goes on: a statement
// that cannot be run fails by itself, and the others need not.
func inspect(
	ctx context.Context, p *reporter, db *table.DB, t *outbox.Table,
) (now outbox.Table, unfit, err error) {
	now, problems, err := db.Inspect(ctx, t)
	if hint.CodeOf(err) != "" {
		problems.Failed(check.Error, "table-unreadable", err)
		err = nil
	}
	unfit = problems.FirstError()
	if unfit == nil && err == nil {
		p.over("table_unfit/"+t.String()+"/", alarm.TableUnfit, zapTable(t))
	}
	if unfit != nil && !p.limited("table_unfit/"+t.String()+"/"+hint.CodeOf(unfit), factsAgain) {
		p.alarm(alarm.TableUnfit, append(why(unfit), zapTable(t))...)
	}
	return now, unfit, err
}

// checkColumns returns what keeps the WAL from bringing every column of a layout, nil where nothing does.
func checkColumns(ctx context.Context, db *table.DB, tables []*outbox.Table) error {
	for _, t := range tables {
		_, problems, err := db.Inspect(ctx, t)
		if err != nil {
			return err
		}
		for _, p := range problems {
			if p.Code == "table-columns" || p.Code == "table-generated-column" {
				return p.Err
			}
		}
	}
	return nil
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

// checkStream returns what ends the session: the stream is gone, is another one, or is unfit. Where JetStream
// is away, the publisher notices. A relay without events notices a missing stream only here.
func (s *session) checkStream(ctx context.Context) error {
	info, err := s.stream.Info(ctx)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		return err
	case err != nil:
		return nil
	case !info.Created.Equal(s.past.created):
		return errStreamReplaced
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
	if _, err := s.compareTables(ctx, s.reporter, s.db); err != nil || s.wal == nil {
		return err
	}
	if err := s.past.published.check(ctx, s.db); err != nil {
		return err
	}
	return s.checkPublished(ctx, &s.past.published.last.Membership)
}

// published knows whether the publication brings every row. A session's start and then its watchFacts own it,
// one session after the other.
type published struct {
	reporter *reporter
	cfg      *Config
	last     *stream.PublicationLook
}

// check raises an alarm where the publication leaves out rows.
func (p *published) check(ctx context.Context, db *table.DB) error {
	look := stream.PublicationLook{
		Membership: stream.Membership{Publication: p.cfg.Publication, Tables: p.cfg.Outboxes}, Before: p.last,
	}
	if err := db.Use(ctx, look.Take); err != nil {
		return err
	}
	p.last = &look
	if look.Problem == nil {
		p.reporter.over("unpublished/", alarm.Unpublished)
		return nil
	}
	if !p.reporter.limited("unpublished/"+look.Problem.Error(), factsAgain) {
		p.reporter.alarm(alarm.Unpublished, why(look.Problem)...)
	}
	return nil
}
