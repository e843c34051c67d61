package table

import (
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgerrcode"

	"github.com/walpost/walpost/internal/pg"
)

// statementLimit is the server's time limit for a statement. It lies below pg.StatementTimeout, so that a
// statement over too many large rows costs neither the connection nor the lock. A variable for tests.
var statementLimit = 20 * time.Second

// Statements over rows read all of their columns, to hash them: at most so many rows, of so many bytes
// where that is known. A row that is larger has a statement to itself.
const (
	portionRows  = 1000
	portionBytes = 16 << 20
)

// portionSize is how many rows a statement of a connection may have. It is halved where one takes too
// long, and doubled again after quick ones. Zero is portionRows.
type portionSize struct{ rows atomic.Int64 }

func (p *portionSize) most() int {
	if n := int(p.rows.Load()); n > 0 {
		return n
	}
	return portionRows
}

// portions runs a statement over many items, as many at once as it has time for. A portion that takes
// too long or that an item spoils is halved, until alone is told what becomes of a single one.
type portions[T any] struct {
	size  *portionSize
	bytes func(T) int // nil: not known
	// do counts what a statement returned only once the statement has ended: it may be cancelled after its
	// last row, and is then run again over fewer items.
	do func([]T) error
	// spoils reports whether an error may be due to one of the items. nil: isUnreadable.
	spoils func(error) bool
	// alone is told what a single item has failed with. If it returns nil, run goes on with the others.
	// Without alone, every error ends run, but a portion that takes too long is halved.
	alone func(T, error) error
}

func (p portions[T]) run(items []T) error {
	if p.spoils == nil {
		p.spoils = isUnreadable
	}
	most := len(items) // halved at an error that an item may have caused, doubled after each portion
	for len(items) > 0 {
		n := p.next(items[:min(len(items), most, p.size.most())])
		begun := time.Now()
		err := p.do(items[:n])
		switch {
		case err == nil:
			if time.Since(begun) < statementLimit/4 {
				p.size.rows.Store(int64(min(2*p.size.most(), portionRows)))
			}
		case TooLong(err) && n > 1:
			p.size.rows.Store(int64(n / 2))
			continue
		case p.alone == nil || !p.spoils(err):
			if TooLong(err) { // not the server's code: the next try would take as long
				return fmt.Errorf("a single row takes longer than %s: %v", statementLimit, err)
			}
			return err
		case n > 1:
			most = n / 2
			continue
		default:
			if err := p.alone(items[0], err); err != nil {
				return err
			}
		}
		items = items[n:]
		most = max(2*most, 1)
	}
	return nil
}

// next is how many of the items make a portion: at least one.
func (p portions[T]) next(items []T) int {
	if p.bytes == nil {
		return len(items)
	}
	bytes := 0
	for n, item := range items {
		if bytes += p.bytes(item); bytes > portionBytes && n > 0 {
			return n
		}
	}
	return len(items)
}

// TooLong reports whether a statement met its time limit: a smaller one may not.
func TooLong(err error) bool { return pg.Code(err) == pgerrcode.QueryCanceled }

// isUnreadable reports whether a statement failed for a value: an id that the column's type cannot hold,
// or what a row holds, where it cannot be converted or rendered as text, or is longer than 1 GB as text.
func isUnreadable(err error) bool {
	return pg.InClass(err, pg.DataException, pg.ProgramLimitExceeded, pg.InternalError)
}
