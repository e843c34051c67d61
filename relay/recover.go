package relay

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// recover looks at the relay's newest messages and marks those whose rows are
// still pending: what was stored by a session that could not mark it. It goes
// back, in steps of U, until a step shows nothing pending and nothing marked
// later than the oldest mark of the newest step. Then it marks, the oldest row
// first: broken off at any point, it leaves the pending rows at the tail, where
// the next one finds them.
func (r *Relay) recover(ctx context.Context, db *fallback.DB, wal *stream.Session, sys stream.System, info *jetstream.StreamInfo) (*recoveryState, error) {
	r.noticeLoss(info)
	b := &reader{
		r: r, info: info, db: db, wal: wal, ctx: ctx, tables: map[string]*outbox.Table{}, refs: map[outbox.Ref]struct{}{}, changed: map[changed]struct{}{},
		from: map[*outbox.Table]time.Time{},
	}
	b.recovered = &recoveryState{unmarked: map[outbox.Ref]uint64{}, notShown: map[outbox.Ref]uint64{}, sent: map[outbox.Ref]struct{}{}}
	for _, t := range r.cfg.Outboxes {
		b.tables[t.String()] = t
	}
	options := jetstream.ReadBackOptions{Source: r.envelope.Source(), Phantom: sys.Phantom, Step: b.look, NoConsumer: r.alarmNoConsumer}
	var err error
	if b.recovered.found, err = r.stream.ReadBack(ctx, info.FirstSeq, info.LastSeq, options); err != nil {
		return nil, err
	}
	b.trimmed = b.wanted && info.FirstSeq > 1
	if err := r.resolveRecoveryLSN(ctx, db, sys, b.recovered); err != nil {
		return nil, err
	}
	if f := b.recovered.found; f.Foreign == 0 && !f.Disordered && b.recovered.tail.Commit > 0 {
		b.recovered.sent = nil
	} else if f.Own < jetstream.U && info.FirstSeq <= 1 || !sys.Comparable(b.recovered.sentFrom) {
		b.recovered.sentFrom = outbox.Position{} // nothing of this WAL is further back
	}
	if err := b.compareOnce(); err != nil {
		return nil, err
	}
	if b.oldest.Seq > 0 {
		options.Step = b.mark
		if err := r.stream.ReadOn(ctx, b.oldest.Seq, info.LastSeq, options); err != nil {
			return nil, err
		}
	}
	if n := b.recovered.found.Phantoms; n > 0 {
		r.alarm("phantoms", "the stream holds events of transactions that this server never had (lost in a failover)", zap.Int("messages", n))
	}
	return b.recovered, nil
}

// alarmNoConsumer: the limit may be the account's, which nothing else tells.
func (r *Relay) alarmNoConsumer(err error) {
	if !r.limited("no_consumer", time.Hour) {
		r.alarm("no_consumer", "the stream or the account has as many consumers as it may: messages are read back one by one, slowly",
			zap.Error(err), zap.String("hint", "raise max_consumers, or remove a consumer"))
	}
}

// noticeLoss compares the stream with what this process has seen of it.
func (r *Relay) noticeLoss(info *jetstream.StreamInfo) {
	if !r.known.created.IsZero() && !info.Created.Equal(r.known.created) {
		r.alarm("stream_replaced", "the stream is another one than before", zap.Time("created", info.Created), zap.Time("before", r.known.created))
		r.known.lastSeq = 0
	}
	if info.LastSeq < r.known.lastSeq {
		r.alarm("stream_rolled_back", "the stream ends before a message that JetStream had acknowledged",
			zap.Uint64("last_seq", info.LastSeq), zap.Uint64("acknowledged", r.known.lastSeq))
	}
	r.known.created, r.known.lastSeq = info.Created, info.LastSeq
}

func (r *Relay) resolveRecoveryLSN(ctx context.Context, db *fallback.DB, sys stream.System, s *recoveryState) error {
	tail := s.found.Tail.Position
	end, err := db.InsertLSN(ctx)
	if err != nil {
		return err
	}
	comparable := s.found.HasTail && sys.Comparable(tail)
	if comparable && tail.Commit > end { // the passed LSN need not have been flushed, and a crash may have taken it back
		comparable = false
		r.alarm("server_rolled_back", "the stream holds an event of WAL that the server does not have: the server was restored to an earlier state of the same timeline",
			zap.Stringer("position", tail), zap.Stringer("insert_lsn", end))
	}
	if comparable {
		s.tail = tail
		s.recoveryLSN = max(s.tail.Commit, s.tail.Passed)
	}
	// The WAL may bring the first insert of a dead letter again, which is no row any
	// more and no message.
	died, err := db.DiedLately(ctx, r.cfg.Slot)
	if err == nil && (!comparable || s.found.Beyond || died) {
		s.recoveryLSN = end
	}
	return err
}
