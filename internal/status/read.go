package status

import (
	"context"
	"errors"

	"github.com/jackc/pgerrcode"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// AskPostgres fills in what PostgreSQL tells. Its error ends the report; what cannot be read alone is in
// Unread.
func (r *Report) AskPostgres(ctx context.Context, db *table.DB, slot string, tables []*outbox.Table) error {
	server, err := db.Server(ctx)
	if err != nil {
		return err
	}
	r.Server = &server
	r.askSlots(ctx, db, slot)
	r.askRelay(ctx, db)
	for _, t := range tables {
		r.askOutbox(ctx, db, t)
	}
	letters, err := db.DeadLettersByOutbox(ctx, CountMost)
	if r.look("dead_letters", db.ExplainRead(ctx, nil, err)) {
		n := 0
		for _, some := range letters {
			n += some
		}
		r.DeadLetters, r.DeadLettersOf = &n, letters
	}
	replay, err := db.NextReplay(ctx, slot, nil)
	if r.look("replay", err) {
		r.Replay = replay
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !db.Alive() {
		return errors.New("the connection to PostgreSQL was lost: the report is incomplete")
	}
	return nil
}

func (r *Report) askSlots(ctx context.Context, db *table.DB, name string) {
	slot, fresh, err := ReadSlots(ctx, db, name)
	if r.look("slot", err) {
		r.Slot, r.NewSlot = slot, fresh
	}
}

// ReadSlots reads the relay's slot, and the one that is being made, which may be nil.
func ReadSlots(ctx context.Context, db *table.DB, name string) (slot, fresh *Slot, err error) {
	if slot, err = ReadSlot(ctx, db, name); err != nil {
		return nil, nil, err
	}
	fresh, err = ReadSlot(ctx, db, stream.NewSlotName(name))
	if err != nil || !fresh.Exists || !fresh.Temporary {
		fresh = nil
	}
	return slot, fresh, err
}

// ReadSlot reads one slot, with its walsender.
func ReadSlot(ctx context.Context, db *table.DB, name string) (*Slot, error) {
	state, err := db.ReadSlot(ctx, name)
	s := &Slot{Name: name, Exists: state != nil, SlotState: state}
	if err == nil && state != nil && state.ActivePID != nil {
		s.Walsender, err = db.ReadSession(ctx, *state.ActivePID)
	}
	return s, err
}

func (r *Report) askRelay(ctx context.Context, db *table.DB) {
	holder, err := db.LockHolder(ctx)
	if !r.look("relay", err) {
		return
	}
	r.Relay = &Relay{Mode: "none", Lock: holder}
	if holder != nil {
		r.Relay.Mode = "poll"
		if r.Slot != nil && r.Slot.Streamed() {
			r.Relay.Mode = "stream"
		}
	}
	r.Relay.SlotShared, err = db.HolderDiffers(ctx)
	r.look("relay.slot_shared", err)
	waiting, known, err := db.StandingBy(ctx, holder)
	if err == nil && known {
		r.Relay.StandingBy = &waiting
	}
	if err == nil && (!known || holder != nil && holder.Hidden()) {
		err = hint.Errorf("GRANT pg_read_all_stats TO "+outbox.QuoteIdent(db.User()),
			"the role may not see what others' sessions do: whose client a relay is, and who stands by")
	}
	r.look("relay.standing_by", err)
}

func (r *Report) askOutbox(ctx context.Context, db *table.DB, t *outbox.Table) {
	s := &Outbox{Table: t.Relation(), Mark: t.Mark, Dates: t.Layout.Dates(), Records: t.Layout.Records()}
	r.Outboxes = append(r.Outboxes, s)
	if r.look("outboxes.outbox", db.Bind(ctx, t)) && t.String() != s.Table {
		s.Name = t.String()
	}
	if !r.look("outboxes.where", db.ExplainRead(ctx, t, db.Complete(ctx, t))) {
		return
	}
	for _, q := range []struct {
		part string
		ask  func() error
	}{
		{"outboxes.pending", func() error {
			n, err := db.PendingCount(ctx, t, CountMost)
			if err == nil {
				s.Pending = &n
			}
			return err
		}},
		{"outboxes.oldest_due_age_seconds", func() error {
			age, err := db.OldestPending(ctx, t)
			if seconds := age.Seconds(); err == nil && s.Dates {
				s.OldestDueAge = &seconds
			}
			return err
		}},
		{"outboxes.parked", func() error {
			if !s.Records {
				return nil
			}
			parked, held, err := db.RecordedCount(ctx, t, CountMost)
			if err == nil {
				s.Parked, s.Held = &parked, &held
			}
			return err
		}},
		{"outboxes.progress", func() error {
			if !table.Journals(t) {
				return nil
			}
			p, err := db.Progress(ctx, t)
			if err == nil {
				s.Progress = &p
			}
			return err
		}},
	} {
		err := q.ask()
		if !r.look(q.part, db.ExplainRead(ctx, t, err)) && pg.Code(err) != pgerrcode.QueryCanceled {
			return // it would be the same for the others; only one may be quicker than another
		}
	}
}

// AskStream fills in what NATS tells.
func (r *Report) AskStream(ctx context.Context, s *jetstream.Stream) error {
	info, err := s.Info(ctx)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		r.Stream = &Stream{Name: s.Name()}
		return nil
	}
	if err != nil {
		return err
	}
	r.Stream = &Stream{Name: s.Name(), Exists: true, StreamFacts: factsOf(info)}
	return nil
}

func factsOf(info *jetstream.StreamInfo) *StreamFacts {
	f := &StreamFacts{
		Messages: info.Messages, Bytes: info.Bytes, FirstSeq: info.FirstSeq, LastSeq: info.LastSeq,
		Created: info.Created.UTC(), Replicas: info.Config.Replicas,
		DuplicateWindow: info.Config.Duplicates.Seconds(), Batches: []string{},
	}
	// A purge of everything leaves no time.
	if last := info.LastTime.UTC(); info.LastSeq > 0 && last.Year() > 1970 {
		f.LastMessage = &last
	}
	if info.Leader != "" {
		f.Leader = &info.Leader
	}
	if info.Config.AllowBatchPublish {
		f.Batches = append(f.Batches, string(jetstream.BatchFast))
	}
	if info.Config.AllowAtomicPublish {
		f.Batches = append(f.Batches, string(jetstream.BatchAtomic))
	}
	return f
}
