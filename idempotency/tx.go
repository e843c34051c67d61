package idempotency

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/internal/pg"
)

var (
	// ErrNoRequest means that the context is not that of a request that [Middleware] executes: its method is
	// not one of Options.Methods, or the handler is not wrapped.
	ErrNoRequest = errors.New("no request of idempotency.Middleware in the context")
	// ErrNoResponse means that the function of [Tx] succeeded and wrote no response.
	ErrNoResponse = errors.New("no response was written in the transaction")
	// ErrBegun means that a response, or a part of one, was written before [Tx].
	ErrBegun = errors.New("response was begun before the transaction")
	// ErrBusy means that another [Tx] of the same request is running.
	ErrBusy = errors.New("another transaction of the request is running")
	// ErrEnded means that the function of [Tx] ended the transaction itself. What it committed stays.
	ErrEnded = errors.New("the transaction was ended by the function")
)

// Tx runs f in a transaction on the middleware's pool, and commits what f changed together with the response
// that f wrote to w. The transaction's isolation level is the connection's default. Its first statement locks
// the key's row, so that no other request with the key is executed while it runs.
//
// f decides:
//
//   - It returns nil and wrote a status below 400: the transaction is committed. Tx returns nil after that,
//     and then the response is sent.
//   - It returns nil and wrote a status of 400 or above: the transaction is rolled back, and the response is
//     stored and sent. Tx returns nil.
//   - It returns an error: the transaction is rolled back, what f wrote is discarded, and Tx returns the
//     error. The handler then writes a response to its own ResponseWriter, which is stored; where it writes
//     none, it is 500.
//
// The response has to be complete when f returns: what the handler writes later is refused. Nothing is sent
// before the commit. Where the commit's outcome is not known, the table decides.
//
// After a serialization failure, a deadlock, a timeout, a panic or the loss of the connection, the client
// gets 503 with Retry-After, whatever the handler writes, and a repetition is executed again: nothing was
// committed. f should return errors of statements wrapped with %w. Where it hides such an error, the
// handler's response is sent, but not stored.
//
// f must not use tx after its return, and not end it: Commit and Rollback of tx fail, and a COMMIT as SQL is
// detected but cannot be undone. A nested transaction (tx.Begin) is a savepoint. Tx may be called again after
// an error, but not after it returned nil.
//
// For a request without a key (Options.Optional) Tx does the same, but stores nothing.
func Tx(ctx context.Context, f func(tx pgx.Tx, w http.ResponseWriter) error) error {
	x, ok := ctx.Value(contextKey{}).(*execution)
	if !ok {
		return fmt.Errorf("begin transaction: %w", ErrNoRequest)
	}
	if !x.busy.TryLock() {
		return fmt.Errorf("begin transaction: %w", ErrBusy)
	}
	defer x.busy.Unlock()
	switch {
	case x.response.decided:
		return fmt.Errorf("begin transaction: %w", ErrDecided)
	case x.response.status != 0:
		return fmt.Errorf("begin transaction: %w", ErrBegun)
	}
	x.usedTx = true
	x.outcome = retry // where f panics
	inner := x.response.inner()
	decided, err := x.transact(ctx, inner, f)
	if x.outcome = decided; err == nil {
		x.response.decide(inner)
	}
	return err
}

// handlerTx is the transaction as a handler gets it.
type handlerTx struct{ pgx.Tx }

var errNotYours = errors.New("idempotency.Tx ends the transaction when its function returns")

func (handlerTx) Commit(context.Context) error   { return errNotYours }
func (handlerTx) Rollback(context.Context) error { return errNotYours }

// transact runs f in a transaction, on a connection that it gives back in the end.
func (x *execution) transact(
	ctx context.Context, w *response, f func(pgx.Tx, http.ResponseWriter) error,
) (outcome, error) {
	conn, err := x.pool.Acquire(ctx)
	if err != nil {
		return retry, fmt.Errorf("begin transaction: %w", err)
	}
	defer conn.Release()
	tx, xid, err := x.begin(ctx, conn)
	if err != nil {
		return retry, fmt.Errorf("begin transaction: %w", err)
	}
	defer rollback(ctx, tx)
	err = f(handlerTx{tx}, w)
	switch {
	case err != nil:
	case w.large:
		err = ErrTooLarge
	case w.status == 0:
		err = ErrNoResponse
	case w.status >= http.StatusBadRequest:
		return keep, nil
	default:
		if err = x.commit(ctx, tx, xid, w); err == nil {
			return done, nil
		}
	}
	decided := afterError(ctx, tx, err)
	if conn.Conn().IsClosed() {
		conn.Release() // the pool may have no other
		if x.committed(ctx) {
			return done, nil
		}
	}
	return decided, err
}

// begin locks the key's row. A renewal of the lease between the two statements is a serialization failure at
// REPEATABLE READ, and no reason to give up.
func (x *execution) begin(ctx context.Context, conn *pgxpool.Conn) (tx pgx.Tx, xid string, err error) {
	for range 5 {
		tx, err = conn.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadWrite})
		if err != nil || x.claim == nil {
			return tx, "", err
		}
		if xid, err = x.store.lock(ctx, tx, x.claim); err == nil {
			return tx, xid, nil
		}
		rollback(ctx, tx)
		if pg.Code(err) != pgerrcode.SerializationFailure {
			break
		}
	}
	return nil, "", err
}

// rollback does nothing after a commit.
func rollback(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	_ = tx.Rollback(ctx) // where it fails the connection is closed, which rolls back, too
}

// commit stores the response and commits. It does not end with ctx: the work is done.
func (x *execution) commit(ctx context.Context, tx pgx.Tx, xid string, w *response) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	if x.claim != nil {
		if err := x.finish(ctx, tx, xid, w); err != nil {
			return fmt.Errorf("store response: %w", err)
		}
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit transaction: %w", err)
	}
	return nil
}

func (x *execution) finish(ctx context.Context, tx pgx.Tx, xid string, w *response) error {
	if tx.Conn().PgConn().TxStatus() == 'I' {
		return ErrEnded
	}
	owned, err := x.store.finish(ctx, tx, x.claim, w, xid)
	if err != nil || owned {
		return err
	}
	var same bool
	err = tx.QueryRow(ctx, `SELECT pg_current_xact_id()::text = $1::text`, xid).Scan(&same)
	switch {
	case err != nil:
		return err
	case !same:
		return ErrEnded
	}
	return errLost
}

// committed asks the row what became of a COMMIT without a reply: only a transaction that was committed has
// completed it. The release waits for that transaction, and succeeds where it was rolled back.
func (x *execution) committed(ctx context.Context) bool {
	if x.claim == nil {
		return false
	}
	_, found, err := x.store.release(ctx, x.claim)
	if err != nil {
		x.Logger.WarnContext(ctx, "read the outcome of a commit", "error", err)
	}
	return found != nil && found.token == x.claim.token
}

// afterError is what becomes of the key when a transaction failed.
func afterError(ctx context.Context, tx pgx.Tx, err error) outcome {
	lost := errors.Is(err, errLost) || errors.Is(err, context.Canceled) ||
		errors.Is(err, context.DeadlineExceeded)
	hidden := pg.Code(err) == "" || pg.Code(err) == pgerrcode.InFailedSQLTransaction
	switch {
	case errors.Is(err, ErrEnded):
		return keep
	case lost, ctx.Err() != nil, tx.Conn().IsClosed(), passes(err):
		return retry
	case hidden && tx.Conn().PgConn().TxStatus() == 'E':
		return free // a statement failed, and why is not known
	}
	return keep
}

// passes reports whether the same transaction may succeed a moment later.
func passes(err error) bool {
	switch pg.Code(err) {
	case pgerrcode.SerializationFailure, pgerrcode.DeadlockDetected, pgerrcode.LockNotAvailable:
		return true
	}
	return pg.InClass(err, "08", "53", "57")
}
