package verify

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// visiblePatience is how long open transactions are waited for, whose rows are not
// visible yet.
const visiblePatience = 20 * time.Second

// stranger keeps a message without a row, of too many the newest: the rows of those
// may only not be visible yet.
func (v *comparison) stranger(m jetstream.Message) {
	if len(v.strangers) == remembered {
		v.note("more than %d messages have no row: only the newest were looked at", remembered)
		v.strangers = slices.Delete(v.strangers, 0, remembered/2)
	}
	v.strangers = append(v.strangers, m)
}

// judgeStrangers looks again for the rows of messages that had none: a message may be
// there before its row is visible.
func (v *comparison) judgeStrangers(ctx context.Context) error {
	dropped := func(m jetstream.Message) bool { return m.Seq < v.report.FirstSeq }
	left := slices.DeleteFunc(v.strangers, dropped)
	if len(left) == 0 {
		return nil
	}
	seen := map[outbox.MessageID]uint64{}
	for _, m := range left {
		if seq := seen[m.ID]; seq > 0 {
			detail := fmt.Sprintf("it is at sequence %d already", seq)
			v.report.add(Duplicated, Case{Row: row(m), Seq: m.Seq, Detail: detail})
		} else {
			seen[m.ID] = m.Seq
		}
	}
	left, err := v.awaitRows(ctx, left)
	old := 0
	for _, m := range left {
		if v.old(m) {
			old++
		} else {
			v.report.add(Unknown, Case{Row: row(m), Seq: m.Seq})
		}
	}
	if old > 0 {
		v.note("%d messages are older than the rows that are kept: they have none any more", old)
	}
	return err
}

// old reports whether the row of such a message may have been deleted from table and archive by now.
func (v *comparison) old(m jetstream.Message) bool {
	if v.cfg.KeptFor == nil {
		return false
	}
	kept := v.cfg.KeptFor(v.tables[m.ID.Table].Table)
	return kept > 0 && time.Since(m.Stored) > kept
}

// awaitRows waits until every transaction has ended that may have written one of the
// rows, as long as any is wanted, and returns the messages that still have none. The
// last message was read before.
func (v *comparison) awaitRows(
	ctx context.Context, messages []jetstream.Message,
) ([]jetstream.Message, error) {
	xid, err := v.db.NewXID(ctx)
	if err != nil {
		return nil, err
	}
	for until := time.Now().Add(visiblePatience); ; {
		ended, err := v.db.EndedBefore(ctx, xid)
		if err != nil {
			return nil, err
		}
		var left []jetstream.Message
		err = v.each(ctx, messages, func(_ *comparedTable, m jetstream.Message, f table.Finding) {
			if f.Place == table.Nowhere {
				left = append(left, m)
			}
		})
		if err != nil {
			return nil, err
		}
		messages = left
		switch {
		case ended || !slices.ContainsFunc(messages, func(m jetstream.Message) bool { return !v.old(m) }):
			return messages, nil
		case time.Now().After(until):
			v.note("transactions are open since before the stream was read: " +
				"the messages of their rows count as unknown")
			return messages, nil
		}
		if !sleep.For(ctx, 200*time.Millisecond) {
			return nil, ctx.Err()
		}
	}
}
