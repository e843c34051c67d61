package fallback

import (
	"slices"
	"sort"
)

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
