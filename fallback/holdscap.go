package fallback

import (
	"github.com/walpost/walpost/outbox"
)

// MostHeld is how many held aggregates a relay remembers.
const MostHeld = 100_000

// Count counts the held aggregates. Rows without an aggregate have no order, and are not counted.
func (h *Holds) Count() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	known := map[*outbox.Table]int{}
	for a := range h.byKey {
		if a.Ordered() {
			known[a.Table]++
		}
	}
	for t, counted := range h.partial {
		known[t] = max(known[t], counted)
	}
	for _, m := range known {
		n += m
	}
	return n
}

// Unsure reports whether only the table can tell if the aggregate is held.
func (h *Holds) Unsure(a Aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.byKey[a] == nil && h.isPartialLocked(a.Table)
}

// forgets reports whether aggregates of a table were forgotten.
func (h *Holds) forgets(t *outbox.Table) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.isPartialLocked(t)
}

func (h *Holds) isPartialLocked(t *outbox.Table) bool {
	_, partial := h.partial[t]
	return partial
}

// forgetLocked makes room for another hold. It forgets many at once, because every answer of a table is
// void then: see AsOf.
func (h *Holds) forgetLocked() {
	if len(h.byKey) < h.most {
		return
	}
	for a, x := range h.byKey {
		if len(h.byKey) <= h.most/2 {
			return
		}
		if x.idle() {
			delete(h.byKey, a)
			h.forgotten++
			h.partial[a.Table] = max(h.partial[a.Table], 1)
		}
	}
}

// AsOf is a moment at which the table is asked about aggregates. Its answer, with the holds that are
// known here, is right until an aggregate is forgotten. Zero is no moment.
type AsOf uint64

func (h *Holds) now() AsOf {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nowLocked()
}

func (h *Holds) nowLocked() AsOf { return AsOf(h.forgotten) + 1 }

// Ask asks the table about the aggregates of rows of one table, of which only it can
// tell, and opens the holds of those that have records. have is table.DB.HaveRecords.
func (h *Holds) Ask(rows []*outbox.Event, have func([]*outbox.Event) ([]bool, error)) (AsOf, error) {
	when := h.now()
	var unsure []*outbox.Event
	for _, ev := range rows {
		if of := AggregateOf(ev); of.Ordered() && h.Unsure(of) {
			unsure = append(unsure, ev)
		}
	}
	if len(unsure) == 0 {
		return when, nil
	}
	recorded, err := have(unsure)
	for i, yes := range recorded {
		if yes {
			h.open(AggregateOf(unsure[i]))
		}
	}
	return when, err
}

// counted notes how many aggregates of a table have records, and, where all are given
// and none was forgotten since the table was asked, remembers them.
func (h *Holds) counted(t *outbox.Table, n int, all []Aggregate, when AsOf) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.isPartialLocked(t) {
		return
	}
	if h.partial[t] = max(n, 1); n != len(all) || when != h.nowLocked() {
		return
	}
	delete(h.partial, t)
	for _, a := range all {
		h.openLocked(a)
	}
	h.resizedLocked()
}

// Load reads the records of every table.
func (h *Holds) Load(
	aggregates func(*outbox.Table, func(outbox.AggregateKey)) error, tables []*outbox.Table,
) error {
	for _, t := range tables {
		n := 0
		err := aggregates(t, func(key outbox.AggregateKey) {
			n++
			h.open(Aggregate{t, key})
		})
		if err != nil {
			return err
		}
		h.counted(t, n, nil, 0)
	}
	return nil
}
