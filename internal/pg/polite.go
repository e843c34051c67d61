package pg

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/sleep"
)

// Begin runs a function in a transaction.
type Begin func(context.Context, func(context.Context, pgx.Tx) error) error

// BeginOn returns the transactions of a connection.
func BeginOn(conn *pgx.Conn) Begin {
	return func(ctx context.Context, f func(context.Context, pgx.Tx) error) error {
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return f(ctx, tx) })
	}
}

// Polite changes tables that are in use: their users wait behind a statement for Lock at most, and then have
// as long a pause, or 100 ms, before the next try.
type Polite struct {
	Begin Begin
	Lock  time.Duration
	Tries int
}

// PoliteOn is half a second, twenty times, on a connection.
func PoliteOn(conn *pgx.Conn) Polite {
	return Polite{Begin: BeginOn(conn), Lock: 500 * time.Millisecond, Tries: 20}
}

// Do runs a function in a transaction, and again in another one where somebody held a lock that it needed.
func (p Polite) Do(ctx context.Context, f func(context.Context, pgx.Tx) error) error {
	for i := 1; ; i++ {
		err := p.Begin(ctx, func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, fmt.Sprintf("SET LOCAL lock_timeout = %d", p.Lock.Milliseconds()))
			if err == nil {
				err = f(ctx, tx)
			}
			return err
		})
		pause := max(p.Lock, 100*time.Millisecond)
		if i == p.Tries || !IsBlocked(err) || !sleep.For(ctx, pause) {
			return err
		}
	}
}

// Exec is [Polite.Do] with statements.
func (p Polite) Exec(ctx context.Context, sql string) error {
	return p.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, sql)
		return err
	})
}

// IsBlocked reports whether a lock was not to be had.
func IsBlocked(err error) bool {
	return Code(err) == pgerrcode.LockNotAvailable || Code(err) == pgerrcode.DeadlockDetected
}
