package relay

import (
	"context"
	"errors"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/alarm"
	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
)

// errSharedRows: a relay of another slot delivers rows that this one would deliver, too. Each row would go to
// the one stream, the other or both, so this relay waits.
var errSharedRows = errors.New("another relay delivers some of the same rows")

// deliverAlone has this relay deliver its outboxes while it holds the lock, or returns errSharedRows.
func (l *leader) deliverAlone(ctx context.Context, db *table.DB) error {
	var own []table.Sent
	for _, t := range l.outboxes {
		own = append(own, l.sent(t))
	}
	other, err := db.Deliver(ctx, own)
	if err != nil {
		return err
	}
	if other != nil {
		return l.errOutboxShared(ctx, db, other)
	}
	l.over(kindDelivers, alarm.OutboxShared)
	return nil
}

// The alarm of a relay that waits ends when it delivers, that of a relay that delivers when none waits.
const (
	kindDelivers = "outbox_shared/delivers"
	kindWaits    = "outbox_shared/waits"
)

const hintShared = "let one relay deliver an outbox, and have other streams mirror its stream, or have it " +
	"as a source; or divide the outbox by outboxes[].where that exclude each other, or by shards of one " +
	"set, such as 1/2 and 2/2"

func (s *servers) errOutboxShared(ctx context.Context, db *table.DB, other *table.Deliverer) error {
	return hint.Errorf(hintShared,
		"%w: %s delivers %s through slot %s to stream %s; until it ends nothing is delivered through "+
			"slot %s, which keeps WAL if it exists",
		errSharedRows, describe(ctx, db, other.PID), other.Outbox, other.Slot, other.Stream, s.cfg.Slot)
}

func describe(ctx context.Context, db *table.DB, pid uint32) string {
	session, err := db.ReadSession(ctx, pid)
	if err != nil || session == nil {
		session = &pg.Session{PID: pid}
	}
	return session.String()
}

// awaitDeliverer raises the alarm when the server has had time to notice that the other relay has ended.
// This relay stays ready: the other one may be what a rolling deployment replaces.
func (l *leader) awaitDeliverer(shared error, since time.Duration) {
	l.status.set(stateStandby, shared)
	switch {
	case since < lockPatience:
	case l.cfg.Once:
		l.once.end(shared)
	case !l.limited(kindDelivers, factsAgain):
		l.alarm(alarm.OutboxShared, why(shared)...)
	}
}

// noticeAwaiting raises the alarm while another relay waits for this one.
func (s *session) noticeAwaiting(ctx context.Context) error {
	pid, err := s.db.Awaiting(ctx)
	if err != nil {
		return err
	}
	if pid == 0 {
		s.over(kindWaits, alarm.OutboxShared)
		return nil
	}
	if !s.limited(kindWaits, factsAgain) {
		s.alarm(alarm.OutboxShared, zap.String("waiting", describe(ctx, s.db, pid)),
			zap.String("hint", hintShared))
	}
	return nil
}

// findDeliverer is for doctor: whether a relay that does not hold the lock of this slot delivers rows of its
// outboxes.
func (x *checker) findDeliverer(ctx context.Context, holder *pg.Session) error {
	var own []table.Sent
	for _, t := range x.cfg.Outboxes {
		own = append(own, table.Sent{Outbox: t.String(), Shard: t.Shard.String(), Condition: t.Where})
	}
	var pid uint32
	if holder != nil {
		pid = holder.PID
	}
	other, err := x.db.Deliverer(ctx, own, pid)
	if err != nil || other == nil {
		return nil // checkInitialRows reads the same table
	}
	return x.errOutboxShared(ctx, x.db, other)
}
