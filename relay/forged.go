package relay

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

const (
	// compareBatch and compareBytes bound what is compared at once, and readers how many
	// messages are read at a time: each is in memory as a whole.
	compareBatch = 64
	compareBytes = 4 << 20
	readers      = 4
)

// genuine leaves out the messages that have a pending row's id, and are not what the relay has published for
// it: another writer has forged them, and their rows are still to be sent. Only rows that a crash has left
// unmarked are pending here, so few bodies are read.
func (f *forwardScan) genuine(
	ctx context.Context, t *outbox.Table, ms []jetstream.Message, rows []table.Row,
) (kept []table.Row, behind []uint64, err error) {
	for len(ms) > 0 {
		n, size := 1, ms[0].Size
		for n < min(len(ms), compareBatch) && size+ms[n].Size <= compareBytes {
			size += ms[n].Size
			n++
		}
		seqs := make([]uint64, n)
		for i := range seqs {
			seqs[i] = ms[i].Seq
		}
		stored, err := readMessages(ctx, f.stream, seqs)
		if err != nil {
			return nil, nil, err
		}
		forged := make([]bool, n)
		const trouble = "rows that were read back cannot be compared: trying again"
		err = f.rows.patiently(ctx, t, trouble, func() error {
			return f.rows.db.Whole(ctx, t, rows[:n], longest(stored), func(i int, ev *outbox.Event) {
				forged[i] = stored[i] != nil && !f.rows.like.is(ev, 0, stored[i])
			})
		})
		if err != nil {
			return nil, nil, err
		}
		for i := range n {
			if forged[i] {
				f.rows.reporter.alarmForged(rows[i].Ref, ms[i].Seq)
				continue
			}
			kept, behind = append(kept, rows[i]), append(behind, ms[i].Behind)
		}
		ms, rows = ms[n:], rows[n:]
	}
	return kept, behind, nil
}

// longest is the length of the longest body, in bytes: no payload of these messages is longer.
func longest(ms []*jetstream.StoredMessage) (n int) {
	for _, m := range ms {
		if m != nil {
			n = max(n, len(m.Body))
		}
	}
	return n
}

// readMessages reads whole messages. One that is gone since is nil.
func readMessages(
	ctx context.Context, from *jetstream.Stream, seqs []uint64,
) ([]*jetstream.StoredMessage, error) {
	stored, errs := make([]*jetstream.StoredMessage, len(seqs)), make([]error, len(seqs))
	var all sync.WaitGroup
	for worker := range min(readers, len(seqs)) {
		all.Go(func() {
			for i := worker; i < len(seqs); i += readers {
				if m, err := from.Message(ctx, seqs[i]); err == nil {
					stored[i] = &m
				} else if !errors.Is(err, jetstream.ErrMessageGone) {
					errs[i] = err
					return
				}
			}
		})
	}
	all.Wait()
	return stored, errors.Join(errs...)
}

// isGenuine reports whether a message that JetStream takes for a row's own is that. The WAL brings a row
// before its table shows it: isGenuine waits for that, and where ctx is done first its error says that
// nothing is known.
func (s *session) isGenuine(
	ctx context.Context, d publish.Delivery, m jetstream.StoredMessage,
) (bool, error) {
	row := []table.Row{{Ref: d.Ref, XID: d.XID}}
	for {
		seen, own := false, false
		err := s.db.Whole(ctx, d.Ref.Table, row, len(m.Body), func(_ int, ev *outbox.Event) {
			seen, own = true, s.recovered.like.is(ev, d.Replay, &m)
		})
		if err != nil {
			return false, err
		}
		if seen {
			if !own {
				s.alarmForged(d.Ref, m.Seq)
			}
			return own, nil
		}
		if d.Replay != 0 {
			return true, nil // the row is archived, or was changed: in any case it is refused
		}
		states, err := s.db.LookUp(ctx, d.Ref.Table, row)
		if err != nil {
			return false, err
		}
		if shown := states[0]; !shown.Same && (shown.Exists || shown.Visible) {
			return true, nil // gone, or changed: nothing will be marked
		}
		if !sleep.For(ctx, 20*time.Millisecond) {
			return false, ctx.Err()
		}
	}
}
