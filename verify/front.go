package verify

import (
	"context"
	"slices"
	"time"

	"github.com/walpost/walpost/internal/jetstream"
	"github.com/walpost/walpost/internal/table"
)

// trim has rows left out whose messages may have been at the stream's front, where
// limits, an age or somebody has dropped them: nothing tells those from lost ones. A
// stream that was empty says nothing, and everything is compared with it.
func (v *comparison) trim(info *jetstream.StreamInfo) {
	v.front = info.FirstSeq
	if info.Messages == 0 || info.FirstSeq <= max(1, info.Config.FirstSeq) {
		return
	}
	if from := info.FirstTime.Add(clocks); from.After(v.since) {
		v.since, v.trimmed = from, true
	}
}

// kept drops the rows whose messages may have been dropped since the comparison
// began.
func (v *comparison) kept(ctx context.Context, rows []table.MarkedRow) ([]table.MarkedRow, error) {
	if len(rows) == 0 || v.wasEmpty {
		return rows, nil
	}
	info, err := v.cfg.Stream.Info(ctx)
	if err != nil {
		return nil, err
	}
	v.trim(info)
	early := func(row table.MarkedRow) bool { return row.Marked.Before(v.since) }
	return slices.DeleteFunc(rows, early), nil
}

func (v *comparison) noteFront() {
	if v.trimmed {
		v.note("rows that were marked before %s were not looked for: "+
			"the stream has dropped its messages before sequence %d",
			v.since.UTC().Format(time.RFC3339), v.front)
	}
}
