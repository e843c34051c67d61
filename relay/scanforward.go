package relay

import (
	"context"
	"fmt"

	"go.uber.org/zap"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// forwardScan is the last pass of a recovery. It goes from the oldest pending row's message to the tail and
// marks each row whose own message id it reads. The oldest comes first: if the scan breaks off
// anywhere, it leaves the pending rows at the tail, where the next recovery finds them.
type forwardScan struct {
	rows     *messageRows
	stream   *jetstream.Stream
	behind   uint64                // own messages behind the next one
	unmarked map[outbox.Ref]uint64 // see recoveryState
}

// scanForward returns the rows that could not be marked yet.
func scanForward(
	ctx context.Context, from *jetstream.Stream, rows *messageRows, oldest jetstream.Message,
	info *jetstream.StreamInfo, o jetstream.ScanOptions,
) (map[outbox.Ref]uint64, error) {
	f := &forwardScan{rows: rows, stream: from, behind: oldest.Behind, unmarked: map[outbox.Ref]uint64{}}
	if oldest.Seq == 0 {
		return f.unmarked, nil
	}
	o.Step = func(messages []jetstream.Message) (more bool, err error) { return true, f.step(ctx, messages) }
	return f.unmarked, from.ScanForward(ctx, oldest.Seq, info.LastSeq, o)
}

// step marks the rows of up to U messages that are pending, the oldest first.
func (f *forwardScan) step(ctx context.Context, messages []jetstream.Message) error {
	for i := range messages {
		if messages[i].Behind = f.behind; f.behind > 0 {
			f.behind--
		}
	}
	return f.rows.each(ctx, messages, func(batch rowBatch) error {
		var pending []table.Row
		var claims []jetstream.Message
		for i, s := range batch.states {
			if s.Exists && s.Same && s.Pending {
				pending, claims = append(pending, batch.rows[i]), append(claims, batch.messages[i])
			}
		}
		pending, behind, err := f.genuine(ctx, batch.table, claims, pending)
		if err != nil || len(pending) == 0 {
			return err
		}
		return f.mark(ctx, batch.table, pending, behind)
	})
}

func (f *forwardScan) mark(ctx context.Context, t *outbox.Table, rows []table.Row, behind []uint64) error {
	db := f.rows.db
	verdicts, err := db.Mark(ctx, t, rows)
	if err != nil && (!waitsOut(err) || !db.Alive()) {
		return err
	}
	marked := 0
	for i, row := range rows {
		if err == nil && verdicts[i] == table.Done {
			marked++
			continue
		}
		f.unmarked[row.Ref] = behind[i]
	}
	if n := len(f.unmarked); n > mostCompared { // somebody has made many pending again, and has them locked
		return fmt.Errorf("mark rows of %s that were read back: %d cannot be marked yet", t, n)
	}
	f.rows.reporter.log.Info("marked rows that were found in the stream", zapTable(t),
		zap.Int("rows", marked), zap.Int("waiting", len(rows)-marked))
	return nil
}
