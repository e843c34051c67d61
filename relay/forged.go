package relay

import (
	"bytes"
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

// genuine leaves out the messages that have a pending row's id and another payload: another
// writer has forged them, and their rows are still to be sent. Only rows that a crash has
// left unmarked are pending here, so few bodies are read.
func (f *forwardScan) genuine(
	ctx context.Context, t *outbox.Table, ms []jetstream.Message, rows []table.Row,
) (kept []table.Row, behind []uint64, err error) {
	for len(ms) > 0 {
		n, size := 1, ms[0].Size
		for n < min(len(ms), compareBatch) && size+ms[n].Size <= compareBytes {
			size += ms[n].Size
			n++
		}
		var sums [][]byte
		const trouble = "rows that were read back cannot be compared: trying again"
		err := f.rows.patiently(ctx, t, trouble, func() (err error) {
			sums, err = f.rows.db.PayloadSums(ctx, t, rows[:n])
			return err
		})
		if err != nil {
			return nil, nil, err
		}
		stored, err := readMessages(ctx, f.stream, ms[:n])
		if err != nil {
			return nil, nil, err
		}
		for i, s := range stored {
			if s != nil && sums[i] != nil && !bytes.Equal(sums[i], s.Sum[:]) {
				f.rows.reporter.alarmForged(rows[i].Ref, ms[i].Seq)
				continue
			}
			kept, behind = append(kept, rows[i]), append(behind, ms[i].Behind)
		}
		ms, rows = ms[n:], rows[n:]
	}
	return kept, behind, nil
}

// readMessages reads whole messages. One that is gone since is nil.
func readMessages(
	ctx context.Context, from *jetstream.Stream, ms []jetstream.Message,
) ([]*jetstream.StoredMessage, error) {
	stored, errs := make([]*jetstream.StoredMessage, len(ms)), make([]error, len(ms))
	var all sync.WaitGroup
	for worker := range readers {
		all.Go(func() {
			for i := worker; i < len(ms); i += readers {
				if m, err := from.Message(ctx, ms[i].Seq); err == nil {
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

// isGenuine reports whether a message that JetStream takes for a row's own has the row's
// payload. The WAL brings a row before its table shows it: isGenuine
// waits for that, and where ctx is done first its error says that nothing is known.
func (s *session) isGenuine(
	ctx context.Context, d publish.Delivery, seq uint64, m jetstream.StoredMessage,
) (bool, error) {
	row := []table.Row{{Ref: d.Ref, XID: d.XID}}
	for {
		sums, err := s.db.PayloadSums(ctx, d.Ref.Table, row)
		switch {
		case err != nil:
			return false, err
		case sums[0] != nil && bytes.Equal(sums[0], m.Sum[:]):
			return true, nil
		case sums[0] != nil:
			s.alarmForged(d.Ref, seq)
			return false, nil
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
