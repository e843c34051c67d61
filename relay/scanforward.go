package relay

import (
	"fmt"

	"go.uber.org/zap"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// mark is the way on: it marks what is pending, the oldest first.
func (b *reader) mark(messages []jetstream.Message) (more bool, err error) {
	for i := range messages {
		if messages[i].Behind = 0; b.oldest.Behind > b.passed {
			messages[i].Behind = b.oldest.Behind - b.passed
		}
		b.passed++
	}
	return true, b.each(messages, func(t *outbox.Table, ms []jetstream.Message, rows []fallback.Row, states []fallback.State) error {
		var pending []fallback.Row
		var claims []jetstream.Message
		for i, s := range states {
			if s.Exists && s.Same && s.Pending {
				pending, claims = append(pending, rows[i]), append(claims, ms[i])
			}
		}
		pending, behind, err := b.genuine(t, claims, pending)
		if err != nil || len(pending) == 0 {
			return err
		}
		return b.settle(t, pending, behind)
	})
}

func (b *reader) settle(t *outbox.Table, rows []fallback.Row, behind []uint64) error {
	verdicts, err := b.db.Mark(b.ctx, t, rows)
	if err != nil && (!fallback.Passing(err) || !b.db.Alive()) {
		return err
	}
	marked := 0
	for i, row := range rows {
		if err == nil && verdicts[i] == fallback.Done {
			marked++
			continue
		}
		b.recovered.unmarked[row.Ref] = behind[i]
	}
	if n := len(b.recovered.unmarked); n > mostCompared { // somebody has made many pending again, and has them locked
		return fmt.Errorf("mark rows of %s that were read back: %d cannot be marked yet", t, n)
	}
	b.r.log.Info("marked rows that were found in the stream", zapTable(t), zap.Int("rows", marked), zap.Int("waiting", len(rows)-marked))
	return nil
}
