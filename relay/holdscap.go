package relay

import "github.com/walpost/walpost/outbox"

// mostHeld is how many aggregates are remembered. A variable for tests.
var mostHeld = 100_000

// aggregates counts the held aggregates. Rows without an aggregate have no order, and are not counted.
func (h *holds) aggregates() (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	known := map[*outbox.Table]int{}
	for a := range h.byKey {
		if a.ordered() {
			known[a.table]++
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

// unsure reports whether only the table can tell if the aggregate is held.
func (h *holds) unsure(a aggregate) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.byKey[a] == nil && h.isPartial(a.table)
}

// forgets reports whether aggregates of a table were forgotten.
func (h *holds) forgets(t *outbox.Table) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.isPartial(t)
}

func (h *holds) isPartial(t *outbox.Table) bool {
	_, partial := h.partial[t]
	return partial
}

// forget makes room for another hold. It forgets many at once, because every answer of a table is
// void then: see asOf.
func (h *holds) forget() {
	if len(h.byKey) < mostHeld {
		return
	}
	for a, x := range h.byKey {
		if len(h.byKey) <= mostHeld/2 {
			return
		}
		if x.idle() {
			delete(h.byKey, a)
			h.forgotten++
			h.partial[a.table] = max(h.partial[a.table], 1)
		}
	}
}

// asOf is a moment at which the table is asked about aggregates. Its answer, with the holds that are
// known here, is right until an aggregate is forgotten. Zero is no moment.
type asOf uint64

func (h *holds) now() asOf {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.nowLocked()
}

func (h *holds) nowLocked() asOf { return asOf(h.forgotten) + 1 }

// ask asks the table about the aggregates of rows of one table, of which only it can
// tell, and opens the holds of those that have records. have is table.DB.HaveRecords.
func (h *holds) ask(rows []*outbox.Event, have func([]*outbox.Event) ([]bool, error)) (asOf, error) {
	when := h.now()
	var unsure []*outbox.Event
	for _, ev := range rows {
		if of := aggregateOf(ev); of.ordered() && h.unsure(of) {
			unsure = append(unsure, ev)
		}
	}
	if len(unsure) == 0 {
		return when, nil
	}
	recorded, err := have(unsure)
	for i, yes := range recorded {
		if yes {
			h.open(aggregateOf(unsure[i]))
		}
	}
	return when, err
}

// counted notes how many aggregates of a table have records, and, where all are given
// and none was forgotten since the table was asked, remembers them.
func (h *holds) counted(t *outbox.Table, n int, all []aggregate, when asOf) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.isPartial(t) {
		return
	}
	if h.partial[t] = max(n, 1); n != len(all) || when != h.nowLocked() {
		return
	}
	delete(h.partial, t)
	for _, a := range all {
		h.openLocked(a)
	}
	h.resized()
}

// load reads the records of every table.
func (h *holds) load(
	aggregates func(*outbox.Table, func(outbox.AggregateKey)) error, tables []*outbox.Table,
) error {
	for _, t := range tables {
		if t.Mark == outbox.MarkNone {
			continue
		}
		n := 0
		err := aggregates(t, func(key outbox.AggregateKey) {
			n++
			h.open(aggregate{t, key})
		})
		if err != nil {
			return err
		}
		h.counted(t, n, nil, 0)
	}
	return nil
}
