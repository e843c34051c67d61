package relay

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// Examine makes every check of a start, and more, on both servers, and reports what it
// finds instead of ending at the first, errors before the rest. What a start would refuse
// has the level [check.Error], and so has what would only fail later. It changes nothing,
// takes no lock, and may run beside a relay. It is for a Relay of its own, which is not run.
//
// Questions have time limits: a PostgreSQL host 10 s for a connection and the server
// 30 s for a statement, JetStream 5 s.
func (r *Relay) Examine(ctx context.Context) check.Findings {
	s := r.newStarter(func(error) {})
	x := &examination{starter: s, Findings: s.unverified()}
	x.postgres(ctx)
	if x.db != nil {
		defer x.db.Close()
	}
	x.nats(ctx)
	if r.nc != nil {
		defer r.nc.Close()
	}
	if x.db != nil && r.nc != nil {
		x.seam(ctx)
	}
	return check.InOrder(x.Findings)
}

type examination struct {
	check.Findings
	*starter

	db      *table.DB // nil where PostgreSQL cannot be asked
	streams bool      // the WAL would be read
	standby bool
	held    bool            // a relay is at work
	tables  []*outbox.Table // those that are as they should be
	creates bool            // the stream is to be made
	named   bool            // the envelope is there
	stored  bool            // the stream is there
}

func (x *examination) postgres(ctx context.Context) {
	db, err := x.openDirect(ctx)
	if err != nil {
		x.Failed(check.Error, "pg-unreachable", err)
		return
	}
	x.db = db
	holder, err := db.LockHolder(ctx)
	x.Failed(check.Error, "pg-unreachable", err)
	x.held = holder != nil
	problems, err := stream.ServerProblems(ctx, db.Conn(), x.cfg.Slot)
	if err != nil {
		x.Failed(check.Error, "pg-unreachable", err)
		return
	}
	x.server(problems)
	x.describe(ctx)
	x.outboxes(ctx)
	x.schemas(ctx)
	x.replication(ctx)
	x.settings(ctx)
	x.clocks(ctx)
}

// server tells what way makes of each problem. What only streaming needs is none where
// the tables are polled, unless it comes first.
func (x *examination) server(problems check.Findings) {
	var refused error
	x.streams, refused = x.way(problems.FirstError())
	for i, p := range problems {
		cannot := errors.Is(p.Err, stream.ErrCannotStream)
		switch {
		case i == 0 && refused != nil:
			x.Failed(check.Error, "pg-unreachable", refused)
		case cannot && x.cfg.Mode == ModePoll:
		case cannot && x.cfg.Mode == ModeAuto, errors.Is(p.Err, stream.ErrNoFreeSlot) && !x.streams:
			x.Failed(check.Warn, "pg-unreachable", p.Err)
		default:
			x.Findings = append(x.Findings, p)
		}
	}
	for _, p := range problems {
		x.streams = x.streams && !errors.Is(p.Err, stream.ErrCannotStream) // else what needs it has no answer
		x.standby = x.standby || p.Code == "pg-standby"
	}
}

// outboxes looks at the tables, and keeps those that are as they should be.
func (x *examination) outboxes(ctx context.Context) {
	for _, t := range x.cfg.Outboxes {
		problems, err := x.db.TableProblems(ctx, t)
		if err != nil {
			x.Failed(check.Error, "table-unreadable", err)
			continue
		}
		x.Findings = append(x.Findings, problems...)
		if t.IDType != "" {
			x.Findings = append(x.Findings, limits(t).About("outbox "+t.String())...)
		}
		if len(problems) == 0 {
			x.tables = append(x.tables, t)
			x.rows(ctx, t)
		}
	}
	if len(x.tables) > 0 {
		x.deadLetters(ctx)
	}
}

// rows looks at a table's indexes and at what is pending in it.
func (x *examination) rows(ctx context.Context, t *outbox.Table) {
	found, err := x.db.IndexFindings(ctx, t)
	x.Findings = append(x.Findings, found...)
	x.Failed(check.Warn, "table-unreadable", err)
	if t.Mark == outbox.MarkNone {
		return
	}
	n, err := x.db.PendingCount(ctx, t, initialLimit+1)
	x.Failed(check.Warn, "table-unreadable", err)
	if n > 0 {
		x.Note("table-pending", "", "outbox %s: %s pending", t, atMost(n, initialLimit, "row is", "rows are"))
	}
}

// letterLimit is where counting dead letters ends.
const letterLimit = 100_000

func (x *examination) deadLetters(ctx context.Context) {
	n, err := x.db.DeadLetterCount(ctx, letterLimit+1)
	x.Failed(check.Warn, "table-unreadable", err)
	if n > 0 {
		x.Warning("table-dead-letters", "`walpost dlq list` shows them; retry them when their cause is gone, or discard them",
			"%s in %s", atMost(n, letterLimit, "dead letter is", "dead letters are"), table.DeadLetters)
	}
}

func atMost(n, limit int, one, many string) string {
	switch {
	case n == 1:
		return "1 " + one
	case n > limit:
		return fmt.Sprintf("more than %d %s", limit, many)
	}
	return fmt.Sprintf("%d %s", n, many)
}

// replication asks as a session would, and for the publication where rows would be streamed.
func (x *examination) replication(ctx context.Context) {
	if x.standby {
		return // it cannot answer
	}
	if x.streams {
		x.publication(ctx)
	}
	sys, why, err := x.system(ctx, x.db, x.streams)
	if why != nil {
		x.streams = false
	}
	x.Failed(check.Warn, "pg-replication-connection", why)
	x.Failed(check.Error, "pg-replication-connection", err)
	if err == nil {
		err = x.nameSource(sys)
		x.Failed(check.Error, "pg-system-identifier", err)
		x.named = err == nil
	}
}

// describe comes before there is a replication connection of its own.
func (x *examination) describe(ctx context.Context) {
	found, err := stream.DescribeServer(ctx, x.db.Conn(), x.streams && !x.held)
	x.Findings = append(x.Findings, found...)
	x.Failed(check.Error, "pg-unreachable", err)
}

func (x *examination) schemas(ctx context.Context) {
	found, err := x.db.WritableSchemas(ctx, x.cfg.Outboxes)
	x.Findings = append(x.Findings, found...)
	x.Failed(check.Error, "pg-unreachable", err)
}

func (x *examination) settings(ctx context.Context) {
	if !x.streams || x.standby {
		return
	}
	found, err := stream.Examine(ctx, x.db.Conn(), stream.Examination{
		Slot: x.cfg.Slot, Publication: x.cfg.Publication, Tables: x.cfg.Outboxes, MaxRetainedWAL: x.cfg.MaxRetainedWAL, Held: x.held,
	})
	x.Findings = append(x.Findings, found...)
	x.Failed(check.Error, "pg-unreachable", err)
}

func (x *examination) publication(ctx context.Context) {
	problems, err := stream.PublicationProblems(ctx, x.db.Conn(), x.cfg.Publication, x.cfg.Outboxes)
	if errors.Is(err, stream.ErrNoPublication) {
		if !x.whole() {
			return // what the tables lack comes first
		}
		if err = stream.MayCreatePublication(ctx, x.db.Conn(), x.cfg.Publication, x.tables); err == nil {
			x.Note("publication-missing", "", "publication %q does not exist: a start creates it", x.cfg.Publication)
		}
	}
	x.Failed(check.Error, "pg-unreachable", err)
	x.Findings = append(x.Findings, problems...)
}

func (x *examination) clocks(ctx context.Context) {
	ahead, give, err := x.db.ClockDifference(ctx)
	if err != nil {
		x.Failed(check.Error, "pg-unreachable", err)
		return
	}
	is := "ahead of"
	if ahead < 0 {
		ahead, is = -ahead, "behind"
	}
	if ahead <= give {
		x.Note("pg-clock", "", "PostgreSQL's clock and this machine's agree (give or take %s)", give.Round(time.Microsecond))
		return
	}
	x.Note("pg-clock", "", "PostgreSQL's clock is %s %s this machine's (give or take %s): walpost_commit_to_ack_seconds is off by that",
		ahead.Round(time.Microsecond), is, give.Round(time.Microsecond))
}

func (x *examination) nats(ctx context.Context) {
	if err := x.connect(ctx); err != nil {
		if x.nc != nil {
			x.nc.Close()
			x.nc = nil
		}
		x.Failed(check.Error, "nats-unreachable", err)
		return
	}
	info, found, err := x.starter.stream.Check(ctx)
	x.Findings = append(x.Findings, found.About("stream "+x.cfg.Stream.Name)...)
	x.stored = info != nil
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound):
		x.missing(ctx, err)
	case err != nil && len(found) == 0:
		x.Failed(check.Error, "stream-unreadable", err)
		return
	}
	x.Findings = append(x.Findings, x.starter.stream.Examine(ctx, info)...)
}

// missing judges a stream that does not exist.
func (x *examination) missing(ctx context.Context, missing error) {
	if x.cfg.CreateStream && !x.whole() {
		// The tables know whether it may be created.
		x.Failed(check.Warn, "stream-missing", hint.Wrap(missing, "put right what the tables lack: the first start then creates it where no row is marked"))
		return
	}
	if err := x.mayCreateStream(ctx, x.db, missing); err != nil {
		x.Failed(check.Error, "table-unreadable", err)
		return
	}
	if err := x.starter.stream.MayCreate(ctx); err != nil {
		x.Failed(check.Error, "stream-unreadable", err)
		return
	}
	x.creates = true
	x.Note("stream-missing", "", "stream %s does not exist: a start creates it", x.cfg.Stream.Name)
}

// whole reports whether all tables are as they should be.
func (x *examination) whole() bool { return x.db != nil && len(x.tables) == len(x.cfg.Outboxes) }

// seam is what both servers decide together.
func (x *examination) seam(ctx context.Context) {
	if !x.whole() || !x.named || !x.creates && !x.stored {
		return
	}
	x.Failed(check.Error, "table-unreadable", x.checkInitial(ctx, x.db, x.streams, x.creates))
}
