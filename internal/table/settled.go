package table

import (
	"sort"
	"strconv"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/walpost/walpost/outbox"
)

// Settled is the ids that the progress of a table with a journal has passed. nil has none.
type Settled struct {
	open []pgtype.Range[pgtype.Int8] // the others, in their order
}

// Has reports whether the id of a row is one.
func (s *Settled) Has(ev *outbox.Event) bool {
	if s == nil {
		return false
	}
	id, err := strconv.ParseInt(string(ev.Values[outbox.ID]), 10, 64)
	if err != nil {
		return false
	}
	i := sort.Search(len(s.open), func(i int) bool {
		return s.open[i].UpperType == pgtype.Unbounded || s.open[i].Upper.Int64 > id
	})
	return i == len(s.open) || s.open[i].Lower.Int64 > id
}
