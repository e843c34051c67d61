package table

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/walpost/walpost/outbox"
)

// mostParts bounds into how many parts a search is divided.
const mostParts = 1 << 12

// tableParts holds the [parts] of each table, by its name.
type tableParts struct{ tables sync.Map }

func (p *tableParts) of(t *outbox.Table) *parts {
	n, _ := p.tables.LoadOrStore(t.String(), new(parts))
	return n.(*parts)
}

// parts is into how many parts a connection divides a search of a table: a power of two. Zero is one.
type parts struct{ n atomic.Int64 }

// run calls search for each part of the rows t, until search has enough. where is a condition on t, or empty
// for all rows. A part has all rows of an aggregate, by the expression hash. A part that takes too long, or
// has too many rows, is halved: search keeps what a statement returned only once the statement has ended.
//
// The number of parts is remembered, and halved after a round of quick statements. Without a hash there is
// one part.
func (p *parts) run(hash string, search func(where string) (enough bool, err error)) error {
	if hash == "" {
		_, err := search("")
		return err
	}
	n, quick := max(p.n.Load(), 1), true
	for i := int64(0); i < n; {
		begun := time.Now()
		enough, err := search(partIs(hash, i, n))
		switch {
		case (TooLong(err) || err == errTooMany) && n < mostParts:
			n, i, quick = 2*n, 2*i, false
			p.n.Store(n)
			continue
		case err != nil:
			return err
		case enough:
			return nil
		}
		quick = quick && time.Since(begun) < statementLimit/8
		i++
	}
	if quick {
		p.n.Store(n / 2)
	}
	return nil
}

// partIs is the condition that a row is in part i of n.
func partIs(hash string, i, n int64) string {
	if n == 1 {
		return ""
	}
	width := uint64(1) << 63 / uint64(n/2)
	from := math.MinInt64 + int64(uint64(i)*width)
	return fmt.Sprintf(" AND %s BETWEEN '%d'::bigint AND '%d'::bigint", hash, from, from+int64(width-1))
}

// errTooMany is the error of a search whose part has more rows than it keeps.
var errTooMany = errors.New("a search found more rows than it keeps")

// recordedHash is the hash for parts of recorded rows t. An index has it, so that a part reads no other rows.
func recordedHash(t *outbox.Table) string {
	if !t.Layout.Has(outbox.AggregateID) {
		return ""
	}
	return MarkOf(t).aggregateHashSQL(t)
}
