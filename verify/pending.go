package verify

import (
	"context"
	"time"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// proofPatience is how long the relay may take to confirm the WAL up to the LSN at which pending rows were
// found.
const proofPatience = 20 * time.Second

// lateness is how much longer than its pause a relay may take to deliver a due row.
const lateness = time.Minute

// judgePending proves that the WAL will not bring pending rows: the relay has confirmed an LSN that was read
// after they were found.
func (v *comparison) judgePending(ctx context.Context) error {
	pending := map[*comparedTable][]string{}
	for _, t := range v.tables {
		ids, err := v.due(ctx, t)
		if err != nil {
			return err
		}
		if len(ids) > 0 {
			pending[t] = ids
		}
	}
	if len(pending) == 0 {
		return nil
	}
	proven, err := v.proven(ctx)
	if err != nil {
		return err
	}
	if err := v.catchUp(ctx); err != nil {
		return err
	}
	for t, ids := range pending {
		for len(ids) > 0 {
			part := ids[:min(batch, len(ids))]
			fetched, err := v.db.Fetch(ctx, t.Table, part, keptPayload) // skips locked rows
			if err != nil {
				return err
			}
			ids = ids[fetched.N:]
			for _, ev := range fetched.Rows {
				switch {
				case table.IsRecorded(ev) || t.seen.has(string(ev.Values[outbox.ID])):
				case !proven:
					v.report.Pending++
				default:
					const detail = "pending and due, and the WAL is past it: " +
						"only the relay's search of the table delivers it"
					v.report.add(Missing, Case{Row: ev.Ref().String(), Detail: detail})
				}
			}
		}
	}
	return nil
}

// due lists pending rows that the WAL should have brought, or that were meant for
// later and should have been delivered from the table by now.
func (v *comparison) due(ctx context.Context, t *comparedTable) (ids []string, err error) {
	fresh, err := v.db.Fresh(ctx, t.Table, v.cfg.DelayThreshold, suspectRows)
	if err != nil {
		return nil, err
	}
	if len(fresh) == suspectRows {
		v.note("%s has %d pending rows or more: only so many were looked at", t, suspectRows)
	}
	var scheduled []string
	for _, c := range fresh {
		switch {
		case c.Early:
		case c.Scheduled:
			scheduled = append(scheduled, c.ID)
		default:
			ids = append(ids, c.ID)
		}
	}
	overdue, err := v.db.Overdue(ctx, t.Table, scheduled, v.cfg.FallbackInterval+lateness)
	return append(ids, overdue...), err
}

func (v *comparison) proven(ctx context.Context) (bool, error) {
	end, err := v.db.InsertLSN(ctx)
	if err != nil {
		return false, err
	}
	if err := v.db.Flush(ctx); err != nil {
		return false, err
	}
	for until := time.Now().Add(proofPatience); ; {
		confirmed, active, err := v.db.Confirmed(ctx, v.cfg.Slot)
		switch {
		case err != nil:
			return false, err
		case confirmed >= end:
			return true, nil
		case !active:
			v.note("nobody streams slot %q: whether pending rows should be stored by now cannot be told",
				v.cfg.Slot)
			return false, nil
		case time.Now().After(until):
			v.note("the relay has not confirmed within %s what was written: "+
				"whether pending rows should be stored by now cannot be told", proofPatience)
			return false, nil
		}
		if !sleep.For(ctx, 100*time.Millisecond) {
			return false, ctx.Err()
		}
	}
}
