package verify

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/walpost/walpost/fallback"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/publish"
)

// judgeStrangers looks again for the rows of messages that had none: a message may be
// there before its row is visible.
func (v *comparison) judgeStrangers(ctx context.Context, started time.Time) error {
	if len(v.strangers) == 0 {
		return nil
	}
	if now, err := v.db.Now(ctx); err != nil {
		return err
	} else if now.Sub(started) < time.Second {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(time.Second):
		}
	}
	seen := map[outbox.MessageID]uint64{}
	old := 0
	err := v.each(ctx, v.strangers, func(t *table, m publish.Message, f fallback.Finding) {
		if seq := seen[m.ID]; seq > 0 {
			v.report.add(Duplicated, Case{Row: row(m), Seq: m.Seq, Detail: fmt.Sprintf("it is at sequence %d already", seq)})
		} else {
			seen[m.ID] = m.Seq
		}
		switch {
		case f.Place != fallback.Nowhere:
		case v.cfg.KeptFor > 0 && time.Since(m.Stored) > v.cfg.KeptFor:
			old++
		default:
			v.report.add(Unknown, Case{Row: row(m), Seq: m.Seq})
		}
	})
	if old > 0 {
		v.note("%d messages are older than the rows that are kept: they have none any more", old)
	}
	return errors.Join(err, ctx.Err())
}
