package relay

import (
	"context"
	"fmt"
	"slices"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// initialLimit is how many pending rows a first start publishes without being told
// to.
const initialLimit = 100_000

// beginning is what is known of the first starts of the outboxes: the rows of outbox_sent, and traces that
// relays have left where it has no row.
type beginning struct {
	*servers
	db        *table.DB
	newStream bool // does not exist yet
	known     []table.Sent
	exists    bool // outbox_sent
}

func (s *servers) beginning(ctx context.Context, db *table.DB, newStream bool) (b *beginning, err error) {
	b = &beginning{servers: s, db: db, newStream: newStream}
	b.known, b.exists, err = db.Sent(ctx, table.SentPrivileges)
	return b, err
}

// sent is the row of outbox_sent of an outbox.
func (s *servers) sent(t *outbox.Table) table.Sent {
	now := table.SentOf(t, s.envelope.Source(), s.cfg.Stream.Name, s.cfg.Stream.Domain)
	now.Slot = s.cfg.Slot
	return now
}

// isFirst reports whether the next start of an outbox is its first one. A trace says why that is not known:
// a relay was here, and outbox_sent does not say what it delivered.
func (b *beginning) isFirst(ctx context.Context, t *outbox.Table) (first bool, trace string, err error) {
	if table.Replaces(t) {
		return false, "", nil
	}
	now := b.sent(t)
	if begun := now.BegunIn(b.known); begun != table.NotKnown {
		return begun == table.NotBegun, whyUnknown[begun], nil
	}
	trace, err = b.trace(ctx, t)
	if trace == "" || err != nil {
		return err == nil, "", err
	}
	// Another relay may have begun since, and left the trace.
	if b.known, _, err = b.db.Sent(ctx, table.SentPrivileges); err != nil {
		return false, "", err
	}
	if begun := now.BegunIn(b.known); begun != table.NotKnown {
		return begun == table.NotBegun, whyUnknown[begun], nil
	}
	return false, trace, nil
}

var whyUnknown = map[table.Begun]string{table.MaybeBegun: "it was delivered with another where"}

// trace is what a relay has left, perhaps of this outbox: under another name it has left the same.
func (b *beginning) trace(ctx context.Context, t *outbox.Table) (string, error) {
	if has, err := b.db.HasSlot(ctx); err != nil || has { // first: the tables may be locked
		return fmt.Sprintf("slot %q exists", b.cfg.Slot), err
	}
	if marked, err := b.db.HasMarks(ctx, t); err != nil || marked {
		return "rows are marked as delivered", err
	}
	if b.newStream {
		return "", nil
	}
	sent, err := b.hasSent(ctx)
	if err != nil || !sent {
		return "", err
	}
	return fmt.Sprintf("stream %s holds messages of source %q", b.cfg.Stream.Name, b.envelope.Source()), nil
}

// knowsSlot reports whether a relay that is remembered has the slot.
func (b *beginning) knowsSlot() bool {
	return slices.ContainsFunc(b.known, func(k table.Sent) bool { return k.Slot == b.cfg.Slot })
}

// checkInitial asks, before anything is changed, what a first start shall do with
// pending rows.
func (s *starter) checkInitial(
	ctx context.Context, db *table.DB, tables []*outbox.Table, newStream bool,
) (f check.Findings) {
	b, err := s.beginning(ctx, db, newStream)
	if err != nil {
		f.Failed(check.Error, "table-unreadable", err)
		return f
	}
	var questions check.Findings
	for _, t := range tables {
		switch s.cfg.Initial {
		case "":
			f.Failed(check.Error, "table-unreadable", b.refuseMany(ctx, t))
		case "none":
			_, err := b.skips(ctx, t)
			if isQuestion(err) {
				questions.Failed(check.Error, "table-initial", err)
			} else {
				f.Failed(check.Error, "table-unreadable", err)
			}
		}
	}
	if len(questions) < len(tables) {
		questions.SetAside()
	}
	return append(f, questions...)
}

// refuseMany returns an error for a first start that would publish a great many rows without being told to.
func (b *beginning) refuseMany(ctx context.Context, t *outbox.Table) error {
	if now := b.sent(t); now.IsNoted(b.known) {
		return nil
	}
	var n int
	err := b.db.Search(ctx, func(ctx context.Context) (err error) {
		n, err = b.db.PendingCount(ctx, t, initialLimit+1)
		return err
	})
	if err != nil || n <= initialLimit {
		return err
	}
	first, _, err := b.isFirst(ctx, t)
	if err != nil || !first {
		return err
	}
	return hint.Coded("table-initial",
		hint.Errorf("set postgres.initial to pending to publish them all, or to none to mark them as "+
			"processed without publishing them",
			"table %s has more than %d pending rows at this first start: postgres.initial must say what "+
				"becomes of them", t, initialLimit))
}

// question returns what an operator has to say of an outbox before it is delivered.
func (s *servers) question(ctx context.Context, db *table.DB, t *outbox.Table) error {
	if s.cfg.Initial != "none" {
		return nil
	}
	b, err := s.beginning(ctx, db, false)
	if err == nil {
		_, err = b.skips(ctx, t)
	}
	return err
}

// skips reports whether a start marks the pending rows of an outbox because postgres.initial is none. It
// fails where nothing tells a first start from a later one, which would lose the pending rows.
func (b *beginning) skips(ctx context.Context, t *outbox.Table) (bool, error) {
	switch {
	case b.cfg.Initial != "none":
		return false, nil
	case !b.exists:
		return false, hint.Coded("table-initial", hint.Errorf(
			"run `walpost migrate up` as the tables' owner; or mark the rows that shall not be published "+
				"yourself, and leave postgres.initial out",
			"postgres.initial none needs table %s, which remembers the first start", table.SentTable))
	}
	first, trace, err := b.isFirst(ctx, t)
	if err != nil || trace == "" {
		return first, err
	}
	return false, hint.Coded("table-initial", hint.Errorf(
		fmt.Sprintf("leave postgres.initial out, or say once what becomes of the pending rows: "+
			"`walpost outbox keep %[1]s` publishes them, `walpost outbox renew %[1]s` has the next start "+
			"mark them as processed", t),
		"postgres.initial is none, and nothing tells whether this is the first start of %s: "+
			"table %s does not have it, and %s", t, table.SentTable, trace))
}

// hasSent reports whether the stream holds a message of this source.
func (s *servers) hasSent(ctx context.Context) (bool, error) {
	info, err := s.stream.Info(ctx)
	if err != nil {
		return false, err
	}
	found, err := s.stream.ScanBackward(ctx, info.FirstSeq, info.LastSeq, jetstream.ScanOptions{
		Source: s.envelope.Source(), Step: func([]jetstream.Message) (bool, error) { return false, nil },
	})
	return found.Own > 0, err
}

// beginOutboxes writes into outbox_sent that this relay delivers its outboxes. A first start with
// postgres.initial none marks the pending rows in the same transaction. The relay that holds the lock calls
// it in each session, before it looks at the slot. A slot that has the marked rows would bring them, now or
// when a relay that polls streams again: it is dropped first.
func (l *leader) beginOutboxes(ctx context.Context, db *table.DB) error {
	b, err := l.beginning(ctx, db, false)
	if err != nil {
		return err
	}
	l.past.remembered = b.knowsSlot()
	var starts []table.Start
	for _, t := range l.outboxes {
		start, err := b.start(ctx, t)
		if err != nil {
			return err
		}
		if start != nil {
			starts = append(starts, *start)
		}
	}
	if slices.ContainsFunc(starts, func(s table.Start) bool { return s.Skips }) {
		if err := l.slots.drop(ctx, db); err != nil {
			return err
		}
	}
	var skipped []int64
	if len(starts) > 0 {
		l.status.own()
		l.status.do("note the first start")
		if skipped, err = table.Begin(ctx, l.database(), starts); err != nil {
			return err
		}
	}
	if err := l.deliverAlone(ctx, db); err != nil { // outbox_sent has all outboxes now
		return err
	}
	for i, n := range skipped {
		if n > 0 {
			l.log.Warn("marked the rows that were pending before the first start, without publishing them "+
				"(postgres.initial: none)",
				zapTable(starts[i].Table), zap.Int64("rows", n))
		}
	}
	return nil
}

// start is what a session's start has to write of an outbox, nil where outbox_sent has it or does not
// exist.
func (b *beginning) start(ctx context.Context, t *outbox.Table) (*table.Start, error) {
	s := &table.Start{Sent: b.sent(t), Table: t}
	if s.IsNoted(b.known) {
		return nil, nil
	}
	var err error
	s.Skips, err = b.skips(ctx, t)
	if err != nil || !b.exists {
		return nil, err
	}
	if s.Initial = "pending"; s.Skips {
		s.Initial = "none"
	}
	return s, nil
}
