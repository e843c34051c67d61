package fallback

import "github.com/walpost/walpost/outbox"

// InHand finds every row that the relay has taken and not settled. A row goes from the recovery buffer to
// the queue of a hold, to the marker, and to the publisher. It is in the next place before it leaves the
// one before. The scans go in this order, so none misses it. Rows that Holds.Join returns to be recorded are
// in no place for a moment: their aggregate stays held, so the poller may record them again, and sends none.
type InHand struct {
	wal       WAL // nil while none is read
	holds     *Holds
	marker    Marker
	publisher Publisher
}

// InHand may be used until the poller is closed. One that was taken before Beside lacks the WAL's rows.
func (l *Poller) InHand() InHand { return InHand{l.wal, l.holds, l.marker, l.publisher} }

// each calls do with every row, and with whether the publisher has it: then it was sent. A row may come
// twice.
func (h InHand) each(do func(ref outbox.Ref, sent bool)) {
	waits := func(ref outbox.Ref) { do(ref, false) }
	if h.wal != nil {
		h.wal.Buffered(waits)
	}
	h.holds.queued(waits)
	h.marker.Busy(waits)
	h.publisher.Unreleased(func(ref outbox.Ref) { do(ref, true) })
}

// Has reports whether the row is in hand.
func (h InHand) Has(ref outbox.Ref) (has bool) {
	h.each(func(other outbox.Ref, _ bool) { has = has || other == ref })
	return has
}

// of is the rows of a table, by their ids, and whether each was sent.
func (h InHand) of(t *outbox.Table) map[string]bool {
	ids := map[string]bool{}
	h.each(func(ref outbox.Ref, sent bool) {
		if ref.Table == t {
			ids[ref.ID] = sent
		}
	})
	return ids
}
