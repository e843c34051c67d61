package verify

import (
	"context"
	"slices"
	"time"

	"github.com/walpost/walpost/outbox"
)

// proofPatience is how long the relay may take to confirm what was written when
// pending rows were found.
const proofPatience = 20 * time.Second

// judgePending proves of pending rows that nobody will deliver them from the WAL:
// the relay has confirmed everything that was written when they had been found.
func (v *comparison) judgePending(ctx context.Context) error {
	pending := map[*table][]string{}
	for _, t := range v.tables {
		if t.Mark == outbox.MarkNone {
			continue
		}
		due, err := v.db.Fresh(ctx, t.Table, time.Second, suspectRows)
		if err != nil {
			return err
		}
		for _, c := range due {
			if !c.Early && !c.Scheduled {
				pending[t] = append(pending[t], c.ID)
			}
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
		for part := range slices.Chunk(ids, batch) {
			rows, more, err := v.db.Fetch(ctx, t.Table, part) // those that nobody has locked
			if err != nil {
				return err
			}
			if more {
				v.note("large pending rows of %s were not all looked at", t)
			}
			for _, ev := range rows {
				switch {
				case ev.Values[outbox.LastError] != nil || t.seen.has(string(ev.Values[outbox.ID])):
				case !proven:
					v.report.Pending++
				default:
					v.report.add(Missing, Case{Row: ev.Ref().String(), Detail: "pending, and the WAL is past it: the relay's next search of the table delivers it"})
				}
			}
		}
	}
	return nil
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
			v.note("nobody streams slot %q: whether pending rows should be stored by now cannot be told", v.cfg.Slot)
			return false, nil
		case time.Now().After(until):
			v.note("the relay has not confirmed within %s what was written: whether pending rows should be stored by now cannot be told", proofPatience)
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
