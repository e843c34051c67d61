package verify

import (
	"context"
	"slices"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// catchUp reads the stream up to its present end.
func (v *comparison) catchUp(ctx context.Context) error {
	info, err := v.cfg.Stream.Info(ctx)
	if err != nil || info.LastSeq < v.next {
		return err
	}
	last := info.LastSeq
	err = v.cfg.Stream.ScanForward(ctx, v.next, last, jetstream.ScanOptions{
		Source: v.cfg.Source, Aggregates: true,
		Step: func(messages []jetstream.Message) (bool, error) {
			if n := len(messages); n > 0 && v.cfg.Progress != nil {
				v.cfg.Progress(messages[n-1].Seq-v.first+1, last-v.first+1)
			}
			if err := v.each(ctx, messages, v.message); err != nil {
				return false, err
			}
			if n := len(messages); n > 0 {
				v.next = messages[n-1].Seq + 1
			}
			return true, nil
		},
	})
	if err == nil {
		v.next = last + 1
	}
	return err
}

// each looks for the rows of messages, and calls do in the messages' order, table by
// table.
func (v *comparison) each(
	ctx context.Context, messages []jetstream.Message,
	do func(*comparedTable, jetstream.Message, table.Finding),
) error {
	for part := range slices.Chunk(messages, batch) {
		byTable := map[*comparedTable][]jetstream.Message{}
		for _, m := range part {
			t := v.tables[m.ID.Table]
			if t == nil {
				v.note("messages of table %s are not compared: it is none of outboxes", m.ID.Table)
				continue
			}
			byTable[t] = append(byTable[t], m)
		}
		for t, ms := range byTable {
			refs := make([]outbox.Ref, len(ms))
			for i, m := range ms {
				refs[i] = outbox.Ref{Table: t.Table, ID: m.ID.ID, Hash: m.ID.Hash}
			}
			forged := make([]bool, len(ms))
			found, err := v.db.FindValues(ctx, t.Table, refs, func(i int, ev *outbox.Event) {
				forged[i] = v.own != nil && !ms[i].ID.Replay && !v.own(t.Table, &ms[i], ev)
			})
			if err != nil {
				return err
			}
			for i, m := range ms {
				if forged[i] {
					v.forged(m)
				} else {
					do(t, m, found[i])
				}
			}
		}
	}
	return nil
}

// forged takes a message that has a row's id, and not its subject and headers. It says nothing of the row.
func (v *comparison) forged(m jetstream.Message) {
	if m.Seq >= v.first {
		v.report.Messages++
		const detail = "another writer has published it under the row's id"
		v.report.add(Unknown, Case{Row: row(m), Seq: m.Seq, Detail: detail})
	}
}

func row(m jetstream.Message) string { return m.ID.Table + "/" + m.ID.ID }

// message takes one message, in the stream's order.
func (v *comparison) message(t *comparedTable, m jetstream.Message, f table.Finding) {
	v.report.Messages++
	switch {
	case m.ID.Replay:
		v.report.Replays++
		return
	case v.cfg.Phantom != nil && m.Row.SystemID != "" && v.cfg.Phantom(m.Row):
		v.report.add(Phantom, Case{Row: row(m), Seq: m.Seq, Detail: m.Row.String()})
		return
	case f.Place == table.Nowhere && table.MarkOf(t.Table).Stays():
		v.stranger(m)
		return
	}
	again := !t.seen.add(m.ID.ID) && v.again(t, m)
	if m.Aggregate == (outbox.AggregateKey{}) {
		m.Aggregate = f.Aggregate
	}
	v.follow(m, v.cfg.Skip || !t.Layout.Records(), again)
}
