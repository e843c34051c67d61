package verify

import (
	"context"
	"fmt"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/outbox"
)

// again notes a row that came before, perhaps as another message: ids come again. It reports
// whether judgeTwice will look at it.
func (v *comparison) again(t *comparedTable, m jetstream.Message) bool {
	if len(v.twice) >= remembered || len(v.late) >= remembered {
		v.note("more than %d rows came more than once: only so many were looked at", remembered)
		return false
	}
	v.twice[t.String()+"/"+m.ID.ID] = struct{}{}
	return true
}

// judgeTwice reads the stream again where rows came more than once, and compares
// whole message ids.
func (v *comparison) judgeTwice(ctx context.Context) error {
	if len(v.twice) == 0 {
		return nil
	}
	first := map[outbox.MessageID]uint64{}
	return v.cfg.Stream.ScanForward(ctx, v.first, v.next-1, jetstream.ScanOptions{
		Source: v.cfg.Source,
		Step: func(messages []jetstream.Message) (bool, error) {
			for _, m := range messages {
				if _, suspect := v.twice[row(m)]; !suspect || m.ID.Replay {
					continue
				}
				if seq := first[m.ID]; seq > 0 {
					detail := fmt.Sprintf("it is at sequence %d already", seq)
					v.report.add(Duplicated, Case{Row: row(m), Seq: m.Seq, Detail: detail})
					continue
				}
				first[m.ID] = m.Seq
				if c, late := v.late[m.Seq]; late {
					v.report.add(Reordered, c)
				}
			}
			return true, ctx.Err()
		},
	})
}
