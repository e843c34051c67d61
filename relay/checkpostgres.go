package relay

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/retention"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// checkTLS looks at the configuration alone. A start warns once, however often it tries.
func (x *checker) checkTLS(context.Context) check.Findings {
	found := x.unverified()
	for _, f := range found {
		if !x.limited(f.Code, math.MaxInt64) {
			x.log.Warn(f.Text, zap.String("code", f.Code), zap.String("fix", f.Fix))
		}
	}
	return found
}

func (x *checker) checkConnection(ctx context.Context) (f check.Findings) {
	db, err := x.openDirect(ctx)
	if err != nil {
		f.Failed(check.Error, "pg-unreachable", err)
		return f
	}
	x.db = db
	x.uncut = context.AfterFunc(ctx, db.Cut) // there is nothing to drain
	return nil
}

func (x *checker) findRelay(ctx context.Context) (f check.Findings) {
	if x.db == nil {
		return nil
	}
	holder, err := x.db.LockHolder(ctx)
	f.Failed(check.Error, "pg-unreachable", err)
	x.held = holder != nil
	differs, err := x.db.HolderDiffers(ctx)
	f.Failed(check.Error, "pg-unreachable", err)
	if differs {
		f.Failed(check.Warn, "slot-shared", x.errSlotShared())
	}
	f.Failed(check.Warn, "outbox-shared", x.findDeliverer(ctx, holder))
	return f
}

// checkServer tells what way makes of each problem. What only streaming needs is none where
// the tables are polled, unless it comes first.
func (x *checker) checkServer(ctx context.Context) (f check.Findings) {
	if x.db == nil {
		return nil
	}
	problems, err := stream.ServerProblems(ctx, x.db.Conn(), x.cfg.Slot)
	if err != nil {
		f.Failed(check.Error, "pg-unreachable", err)
		return f
	}
	x.answers = true
	var refused error
	x.streams, refused = x.way(problems.FirstError())
	f.Failed(check.Error, "pg-unreachable", refused)
	for i, p := range problems {
		cannot := cannotStream(p.Err)
		switch {
		case i == 0 && refused != nil:
		case cannot && x.cfg.Mode == ModePoll:
		case cannot && x.cfg.Mode == ModeAuto, errors.Is(p.Err, stream.ErrNoFreeSlot) && !x.streams:
			f.Failed(check.Warn, "pg-unreachable", p.Err)
		default:
			f = append(f, p)
		}
	}
	for _, p := range problems {
		// Else what needs the WAL has no answer.
		x.streams = x.streams && !cannotStream(p.Err)
		x.standby = x.standby || p.Code == "pg-standby"
	}
	return f
}

// describeServer comes before there is a replication connection of its own.
func (x *checker) describeServer(ctx context.Context) check.Findings {
	if !x.answers {
		return nil
	}
	found, err := stream.DescribeServer(ctx, x.db.Conn(), x.streams && !x.held)
	found.Failed(check.Error, "pg-unreachable", err)
	return found
}

func (x *checker) checkTable(ctx context.Context, t *outbox.Table) (f check.Findings) {
	if !x.answers {
		return nil
	}
	problems, others, err := x.db.TableProblems(ctx, t)
	own := problems.Own().FirstError()
	begun := false
	if own != nil {
		begun, err = x.haveBegun(ctx, t)
	}
	f.Failed(check.Error, "table-unreadable", err)
	switch {
	case err == nil && len(problems)+len(others) == 0:
		x.tables = append(x.tables, t)
	case begun:
		x.aside = cmp.Or(x.aside, own)
		problems.SetAside()
	}
	return slices.Concat(f, problems, others)
}

// haveBegun reports whether outboxes were delivered before. A start goes on without such a one if its table
// does not fit, and delivers it from the table if the publication does not.
func (x *checker) haveBegun(ctx context.Context, outboxes ...*outbox.Table) (bool, error) {
	known, _, err := x.db.Sent(ctx, "SELECT")
	if err == nil {
		err = x.db.Bind(ctx, x.cfg.Outboxes...)
	}
	if hint.CodeOf(err) != "" { // a privilege: what is wrong with the outboxes comes first
		return false, nil
	}
	// Nothing tells whose table one is that is missing: one of those that this relay delivered and has no
	// table of.
	missing := func(k *table.Sent) bool {
		return k.Slot == x.cfg.Slot && !slices.ContainsFunc(x.cfg.Outboxes, func(t *outbox.Table) bool {
			return k.Outbox == t.String()
		})
	}
	return err == nil && !slices.ContainsFunc(outboxes, func(t *outbox.Table) bool {
		return !slices.ContainsFunc(known, func(k table.Sent) bool {
			return k.BegunAt != nil && (k.Outbox == t.String() || t.Known == "" && missing(&k))
		})
	}), err
}

// checkAny ends a start that would set every outbox aside.
func (x *checker) checkAny(context.Context) (f check.Findings) {
	if len(x.tables) == 0 {
		f.Failed(check.Error, "table-unreadable", x.aside)
	}
	return f
}

// checkLimits needs the type of the ids.
func (x *checker) checkLimits(_ context.Context, t *outbox.Table) (f check.Findings) {
	if !x.answers || t.IDType == "" {
		return nil
	}
	x.warnAboutLimits(t)
	if t.Known != "" && t.Known != t.FirstName() {
		f.Note("table-known", "",
			"table %s is outbox %s: message ids, journal and dead letters have that name", t.Relation(), t)
	}
	return append(f, limits(t).About("outbox "+t.String())...)
}

func (x *checker) checkIndexes(ctx context.Context, t *outbox.Table) check.Findings {
	if !slices.Contains(x.tables, t) {
		return nil
	}
	found, err := x.db.IndexFindings(ctx, t)
	found.Failed(check.Warn, "table-unreadable", err)
	size, err := x.db.SizeFindings(ctx, t)
	found = append(found, size...)
	found.Failed(check.Warn, "table-unreadable", err)
	return found
}

// checkGrowth: with retention.interval 0s others make the passes.
func (x *checker) checkGrowth(ctx context.Context, t *outbox.Table) check.Findings {
	r := x.cfg.Retention
	if !slices.Contains(x.tables, t) {
		return nil
	}
	found, err := x.db.GrowthFindings(ctx, t, table.Ages{
		Archive: r.ArchiveAfter > 0, Delete: r.DeleteAfter > 0, ByOthers: r.Interval == 0,
	})
	found.Failed(check.Warn, "table-unreadable", err)
	owners, err := x.db.OwnerFindings(ctx, t)
	found.Failed(check.Warn, "table-unreadable", err)
	found = append(found, owners...)
	kept, err := retention.FindKept(ctx, x.db, t,
		retention.Options{DeleteAfter: r.DeleteAfter, ExcludedAfter: r.ExcludedAfter})
	found.Failed(check.Warn, "table-unreadable", err)
	for _, k := range kept {
		found.Note("table-grows", k.Fix(t), "partition %s", k)
	}
	return found
}

func (x *checker) countPending(ctx context.Context, t *outbox.Table) (f check.Findings) {
	if !slices.Contains(x.tables, t) {
		return nil
	}
	n, err := x.db.PendingCount(ctx, t, initialLimit+1)
	f.Failed(check.Warn, "table-unreadable", err)
	rows := atMost(n, initialLimit, "row is", "rows are")
	switch {
	case n > 0 && (x.held || x.standby): // the lock is the primary's
		f.Note("table-pending", "", "outbox %s: %s pending", t, rows)
	case n > 0:
		f.Warning("table-pending", "`walpost run`", "outbox %s: %s pending, and no relay runs", t, rows)
	}
	return f
}

// lookFor is how long doctor looks for rows that no search finds. verify looks at all.
const lookFor = 5 * time.Second

// findOverlooked looks for pending rows that the searches of a relay pass over.
func (x *checker) findOverlooked(ctx context.Context, t *outbox.Table) (f check.Findings) {
	if !slices.Contains(x.tables, t) {
		return nil
	}
	if err := x.db.CheckEntries(ctx, t); err != nil {
		f.Failed(check.Error, "table-journal-index", err)
		return f
	}
	begun := time.Now()
	for from, more := int64(math.MinInt64), true; more && time.Since(begun) < lookFor; {
		var ids []int64
		var err error
		ids, from, more, err = x.db.Overlooked(ctx, t, from)
		f.Failed(check.Warn, "table-unreadable", err)
		if len(ids) > 0 {
			f.Warning("table-overlooked", "`walpost verify` lists such rows, and with --repair the relay "+
				"delivers them", "outbox %s: row %d is pending, and no search of a relay finds it", t, ids[0])
			return f
		}
	}
	return f
}

func (x *checker) findUnread(ctx context.Context) check.Findings {
	if !x.answers {
		return nil
	}
	found, err := x.db.UnreadFindings(ctx, x.cfg.Outboxes)
	found.Failed(check.Warn, "table-unreadable", err)
	return found
}

// letterLimit is where counting dead letters ends.
const letterLimit = 100_000

func (x *checker) countDeadLetters(ctx context.Context) (f check.Findings) {
	if len(x.tables) == 0 {
		return nil
	}
	n, err := x.db.DeadLetterCount(ctx, letterLimit+1)
	f.Failed(check.Warn, "table-unreadable", err)
	if n > 0 {
		f.Warning("table-dead-letters",
			"`walpost dlq list` shows them; retry them when their cause is gone, or discard them",
			"%s in %s", atMost(n, letterLimit, "dead letter is", "dead letters are"), table.DeadLetters)
	}
	return f
}

// checkReplays: a relay delivers without their table.
func (x *checker) checkReplays(ctx context.Context) (f check.Findings) {
	if len(x.tables) == 0 {
		return nil
	}
	there, err := x.db.TakesReplays(ctx)
	f.Failed(check.Warn, "table-replays", err)
	if err == nil && !there {
		f.Warning("table-replays", "run `walpost migrate up` as the tables' owner",
			"table %s does not exist: no replay can be requested", table.Replays)
	}
	return f
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

func (x *checker) checkSchemas(ctx context.Context) check.Findings {
	if !x.answers {
		return nil
	}
	found, err := x.db.WritableSchemas(ctx, x.cfg.Outboxes)
	found.Failed(check.Error, "pg-unreachable", err)
	return found
}

// checkPublication: a standby cannot answer.
func (x *checker) checkPublication(ctx context.Context) (f check.Findings) {
	if !x.streams || x.standby {
		return nil
	}
	tables := x.cfg.Outboxes
	if x.aside != nil {
		tables = x.tables
	}
	problems, err := stream.PublicationProblems(ctx, x.db.Conn(), x.cfg.Publication, tables)
	if err == nil {
		var others check.Findings
		others, err = stream.OtherTables(ctx, x.db.Conn(), x.cfg.Publication, x.cfg.Outboxes)
		problems = append(problems, others...)
	}
	if err == nil && problems.FirstError() != nil {
		var begun bool
		if begun, err = x.haveBegun(ctx, tables...); begun {
			problems.SetAside() // a session raises the alarm
		}
	}
	if errors.Is(err, stream.ErrNoPublication) {
		if len(x.tables) == 0 {
			return nil // what the tables lack comes first
		}
		err = stream.MayCreatePublication(ctx, x.db.Conn(), x.cfg.Publication, x.tables)
		if x.createsPublication = err == nil; x.createsPublication {
			f.Note("publication-missing", "",
				"publication %q does not exist: a start creates it", x.cfg.Publication)
		}
	}
	f.Failed(check.Error, "pg-unreachable", err)
	x.sayWeaknesses(problems)
	return append(f, problems...)
}

// checkReplication opens a replication connection as a session would, and learns the default source.
func (x *checker) checkReplication(ctx context.Context) (f check.Findings) {
	if !x.answers || x.standby {
		return nil
	}
	sys, why, err := x.system(ctx, x.db, x.streams)
	x.why, x.streams = why, x.streams && why == nil
	f.Failed(check.Error, "pg-replication-connection", err)
	if err != nil {
		return f
	}
	err = x.nameSource(ctx, x.db, sys)
	if hint.CodeOf(err) != "table-known-privileges" || x.whole() { // else a table's check has said so
		f.Failed(check.Error, "pg-system-identifier", err)
	}
	if x.named = err == nil; x.named && x.db.AnyBytes() {
		x.envelope.CheckText()
	}
	return f
}

// checkPolled: a start that polls for this reason logs it when its term begins.
func (x *checker) checkPolled(context.Context) (f check.Findings) {
	f.Failed(check.Warn, "pg-replication-connection", x.why)
	return f
}

func (x *checker) checkSettings(ctx context.Context) check.Findings {
	if !x.streams || x.standby {
		return nil
	}
	found, err := stream.Examine(ctx, x.db.Conn(), stream.Examination{
		Slot: x.cfg.Slot, Publication: x.cfg.Publication, Tables: x.cfg.Outboxes,
		MaxRetainedWAL: x.cfg.MaxRetainedWAL, Held: x.held,
	})
	found.Failed(check.Error, "pg-unreachable", err)
	return found
}

func (x *checker) compareClocks(ctx context.Context) (f check.Findings) {
	if !x.answers {
		return nil
	}
	ahead, give, err := x.db.ClockDifference(ctx)
	if err != nil {
		f.Failed(check.Error, "pg-unreachable", err)
		return f
	}
	is := "ahead of"
	if ahead < 0 {
		ahead, is = -ahead, "behind"
	}
	if ahead <= give {
		f.Note("pg-clock", "", "PostgreSQL's clock and this machine's agree (give or take %s)",
			give.Round(time.Microsecond))
		return f
	}
	f.Note("pg-clock", "",
		"PostgreSQL's clock is %s %s this machine's (give or take %s): "+
			"walpost_commit_to_ack_seconds is off by that",
		ahead.Round(time.Microsecond), is, give.Round(time.Microsecond))
	return f
}

// checkInitialRows is the last: it needs both servers.
func (x *checker) checkInitialRows(ctx context.Context) (f check.Findings) {
	if !x.named || !x.creates && x.info == nil {
		return nil
	}
	return x.checkInitial(ctx, x.db, x.tables, x.creates)
}
