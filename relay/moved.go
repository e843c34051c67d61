package relay

import (
	"context"
	"strconv"

	"github.com/walpost/walpost/outbox"
)

// anyPartitioned reports whether the WAL may bring rows twice.
func anyPartitioned(tables []*outbox.Table) (has bool) {
	for _, t := range tables {
		has = has || t.Partitioned
	}
	return has
}

// takeMoved takes a row of a partitioned table. It reports whether the row is in the relay's
// hands already, so that this is the row once more, and whether the table has to decide
// about it.
func (h *walHandler) takeMoved(ctx context.Context, ev *outbox.Event) (inHand, ask bool, err error) {
	if err := h.moved.ForgetTaken(ctx, h.poller.InHand(), h.db); err != nil {
		return false, false, err
	}
	ref := ev.Ref()
	again, polling, until := h.moved.Take(ref)
	if h.recovered.wasRead(ref) {
		return false, true, nil // its transaction waits for the mark, too
	}
	inHand = polling || again && h.poller.InHand().Has(ref)
	return inHand, again || ev.Commit <= until, nil
}

// takeID takes a row of an append-only table, as takeMoved does. Its id comes once, unless somebody moves the
// row to another partition, or puts it back. Ids that the journal knew of when the session began were taken
// before, and the poller takes some.
func (h *walHandler) takeID(ctx context.Context, ev *outbox.Event) (inHand, ask bool, err error) {
	id, err := strconv.ParseInt(string(ev.Values[outbox.ID]), 10, 64)
	if err != nil {
		return false, false, nil // its failure is told elsewhere
	}
	before, known := h.takenTo[ev.Table]
	if !known {
		err := h.patiently(ctx, ev.Table, func() (err error) {
			before, err = h.db.TakenTo(ctx, ev.Table)
			return err
		})
		if err != nil {
			return false, false, err
		}
		h.takenTo[ev.Table] = before
	}
	ask = id <= before || h.moved.TakeID(ev.Table, id)
	return ask && h.poller.InHand().Has(ev.Ref()), ask, nil
}
