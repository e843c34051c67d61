package e2e

import (
	"context"
	"errors"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// watch looks at random moments, at some of them with the relay frozen: then
// nothing can be put right between the looks at the one server and at the other.
func (d *disturber) watch(ctx context.Context, rng *rand.Rand) {
	for sleep(ctx, between(rng, 200*time.Millisecond, 2500*time.Millisecond)) {
		if rng.IntN(3) == 0 {
			d.relay.freeze(func() { d.observer.glance(ctx, "frozen") })
			continue
		}
		d.observer.glance(ctx, "at work")
	}
}

// lockRows holds some of the newest rows for some seconds, in which the relay
// tells the server more than once what is confirmed, and may be killed and start
// again: the rows can be stored but not marked, and so are neither confirmed nor
// sent again.
func (d *disturber) lockRows(ctx context.Context, rng *rand.Rand) {
	locked := 0
	// The rows from first on were not locked before: none stays so for ever.
	for first := int64(0); sleep(ctx, 10*time.Millisecond); {
		tx, err := d.lockSome(ctx, first)
		if err != nil {
			continue // the database is away, or nothing is pending
		}
		locked++
		hold := between(rng, time.Second, 8*time.Second)
		for begun := time.Now(); time.Since(begun) < hold && sleep(ctx, 500*time.Millisecond); {
			d.observer.glance(ctx, "with rows locked")
		}
		_ = tx.QueryRow(ctx, `SELECT max(id) + 1 FROM outbox_messages`).Scan(&first)
		_ = tx.Conn().Close(context.WithoutCancel(ctx))
	}
	d.t.Logf("rows were locked %d times", locked)
}

var errNothing = errors.New("nothing to lock")

func (d *disturber) lockSome(ctx context.Context, first int64) (pgx.Tx, error) {
	conn, err := pgx.Connect(ctx, d.url)
	if err != nil {
		return nil, err
	}
	tx, err := conn.Begin(ctx)
	if err == nil {
		var locked pgconn.CommandTag
		locked, err = tx.Exec(ctx, `SELECT FROM outbox_messages WHERE processed_at IS NULL AND id >= $1
			ORDER BY id DESC LIMIT 10 FOR UPDATE SKIP LOCKED`, first)
		if err == nil && locked.RowsAffected() == 0 {
			err = errNothing
		}
	}
	if err != nil {
		_ = conn.Close(context.WithoutCancel(ctx))
	}
	return tx, err
}
