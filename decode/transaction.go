package decode

import (
	"errors"
	"fmt"
	"time"

	"github.com/walpost/walpost/outbox"
)

// epoch is PostgreSQL's, 2000-01-01 00:00 UTC, in seconds of Unix time.
const epoch = 946_684_800

var errNoTransaction = errors.New("outside a transaction")

func (d *Decoder) begin(c *cursor) (Message, error) {
	commit, at, xid := outbox.LSN(c.uint64()), timestamp(int64(c.uint64())), c.uint32()
	if c.err != nil {
		return Message{}, c.err
	}
	if d.open {
		return Message{}, fmt.Errorf("inside the transaction that commits at %s", d.event.Commit)
	}
	d.open = true
	d.event.Commit, d.event.CommitTime, d.event.XID, d.event.N = commit, at, xid, 0
	return Message{Kind: Begin, Commit: commit, CommitTime: at, XID: xid}, nil
}

// commit is strict about the LSNs: a wrong end that gets confirmed is data
// that never comes again.
func (d *Decoder) commit(c *cursor) (Message, error) {
	flags := c.uint8()
	commit, end := outbox.LSN(c.uint64()), outbox.LSN(c.uint64())
	at := timestamp(int64(c.uint64()))
	switch {
	case c.err != nil:
		return Message{}, c.err
	case !d.open:
		return Message{}, errNoTransaction
	case flags != 0:
		return Message{}, fmt.Errorf("unknown flags %#x", flags)
	case commit != d.event.Commit:
		return Message{}, fmt.Errorf("at %s, but the transaction was to commit at %s", commit, d.event.Commit)
	case end <= commit:
		return Message{}, fmt.Errorf("at %s ends at %s, not after it", commit, end)
	}
	d.open = false
	return Message{Kind: Commit, Commit: commit, End: end, CommitTime: at, XID: d.event.XID}, nil
}

// timestamp converts microseconds since PostgreSQL's epoch.
func timestamp(micros int64) time.Time {
	return time.Unix(epoch+micros/1e6, micros%1e6*1e3).UTC()
}
