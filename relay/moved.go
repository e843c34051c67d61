package relay

import (
	"context"
	"math"
	"slices"
	"sort"
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
	if _, waits := h.recovered.StoredBefore(ref, false); waits {
		return false, true, nil // its transaction waits for the mark, too
	}
	inHand = polling || again && h.poller.InHand().Has(ref)
	return inHand, again || ev.Commit <= until, nil
}

// takeID takes a row of an append-only table, as takeMoved does. Its id comes once, unless somebody moves the
// row to another partition, or puts it back. Ids that the journal knew of when the session began were taken
// before.
func (h *walHandler) takeID(ctx context.Context, ev *outbox.Event) (inHand, ask bool, err error) {
	id, err := strconv.ParseInt(string(ev.Values[outbox.ID]), 10, 64)
	if err != nil {
		return false, false, nil // its failure is told elsewhere
	}
	ids := h.taken[ev.Table]
	if ids == nil {
		var to int64
		err := h.patiently(ctx, ev.Table, func() (err error) {
			to, err = h.db.TakenTo(ctx, ev.Table)
			return err
		})
		if err != nil {
			return false, false, err
		}
		ids = &idSet{{math.MinInt64, to}}
		h.taken[ev.Table] = ids
	}
	ask = ids.add(id)
	return ask && h.poller.InHand().Has(ev.Ref()), ask, nil
}

// idSet has at least the ids that were added, as ranges in their order. While ids come in about their order
// it has few others.
type idSet []struct{ first, last int64 }

// mostRanges bounds an idSet. Past it the lesser half becomes one range.
const mostRanges = 4096

// add reports whether the set has had an id.
func (s *idSet) add(id int64) (had bool) {
	all := *s
	i := len(all) // of the first range that does not end before the id
	if i > 0 && all[i-1].last >= id {
		i = sort.Search(i, func(i int) bool { return all[i].last >= id })
	}
	before, behind := i > 0 && all[i-1].last == id-1, i < len(all) && all[i].first == id+1
	switch {
	case i < len(all) && all[i].first <= id:
		return true
	case before && behind:
		all[i-1].last = all[i].last
		*s = slices.Delete(all, i, i+1)
	case before:
		all[i-1].last = id
	case behind:
		all[i].first = id
	default:
		*s = slices.Insert(all, i, struct{ first, last int64 }{id, id})
	}
	if half := len(*s) / 2; len(*s) > mostRanges {
		(*s)[half].first = (*s)[0].first
		*s = slices.Delete(*s, 0, half)
	}
	return false
}
