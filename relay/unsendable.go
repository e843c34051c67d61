package relay

import (
	"errors"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/outbox"
	"github.com/walpost/walpost/stream"
)

// errUnsendable means that the walsender has failed at one place of the WAL again and again.
var errUnsendable = errors.New("the server cannot send a row")

// unsendableTries is how many failures at one place are enough. One may have had another cause.
const unsendableTries = 3

// unsendable counts the walsender's failures behind a transaction. That transaction is the greatest
// that was received: a session may begin at an earlier one, and fail at the same place.
type unsendable struct {
	after outbox.LSN
	tries int
}

// countUnsendable returns errUnsendable in place of a failure that has come often enough.
func (l *leader) countUnsendable(err error) error {
	var failure *stream.Unsendable
	if !errors.As(err, &failure) {
		return err
	}
	u := &l.past.unsendable
	if failure.After > u.after {
		*u = unsendable{after: failure.After}
	}
	if u.tries++; u.tries < unsendableTries {
		return err
	}
	return hint.Errorf("see docs/ALARMS.md#unsendable",
		"%w: it has failed %d times behind %s: %w", errUnsendable, u.tries, u.after, err)
}
