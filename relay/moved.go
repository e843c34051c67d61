package relay

import (
	"context"

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
	if _, waits := h.recovered.StoredBefore(ref, false); waits {
		return false, true, nil // its transaction waits for the mark, too
	}
	inHand = polling || again && h.poller.InHand().Has(ref)
	return inHand, again || ev.Commit <= until, nil
}
