package consume

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// handler is one of the four forms of a handler.
type handler struct {
	most  int // events in a call
	begin func(context.Context) (txn, error)
	// call gets a nil transaction where external is set: it runs before the transaction of its offset.
	call     func(ctx context.Context, t txn, events []Event) error
	external bool
}

// Run handles the stream's events one by one, each in a transaction with its offset, until ctx is done. It
// then returns nil. The transaction's isolation level is the connection's default. It is committed when the
// handler returns nil. The handler must not end it, nor use it after its return; tx.Begin is a savepoint.
//
// An error, a panic, a timeout or a failed statement is rolled back, and the event is tried again: see
// [Config]. Errors that say nothing of the event are not counted: serialization failures, deadlocks, lock
// timeouts, and those of a server or connection that is away. A handler should return errors of statements
// wrapped with %w.
//
// Run waits while PostgreSQL or NATS are away. It returns an error where it cannot go on: a wrong
// configuration, missing tables, [ErrTaken], [ErrGap].
func Run(ctx context.Context, cfg Config, f func(ctx context.Context, tx pgx.Tx, e Event) error) error {
	return RunBatch(ctx, cfg.single(), func(ctx context.Context, tx pgx.Tx, events []Event) error {
		return f(ctx, tx, events[0])
	})
}

// RunBatch is [Run] with up to Config.Batch events in one transaction: those that are there, in their order.
// After a failure they are handled one by one.
func RunBatch(
	ctx context.Context, cfg Config, f func(ctx context.Context, tx pgx.Tx, events []Event) error,
) error {
	return run(ctx, cfg, func(c Config) (handler, error) {
		if c.Pool == nil {
			return handler{}, errors.New("missing Pool")
		}
		return handler{
			most: c.Batch, begin: beginPgx(c.Pool),
			call: func(ctx context.Context, t txn, events []Event) error {
				return f(ctx, handlerTx{t.(*pgxTxn).Tx}, events)
			},
		}, nil
	})
}

// RunSQL is [Run] for database/sql. A handler that commits its transaction is noticed, not prevented: its
// event is handled again.
func RunSQL(ctx context.Context, cfg Config, f func(ctx context.Context, tx *sql.Tx, e Event) error) error {
	return run(ctx, cfg.single(), func(c Config) (handler, error) {
		if c.DB == nil {
			return handler{}, errors.New("missing DB")
		}
		return handler{
			most: 1, begin: beginSQL(c.DB),
			call: func(ctx context.Context, t txn, events []Event) error {
				return f(ctx, t.(*sqlTxn).Tx, events[0])
			},
		}, nil
	})
}

// RunExternal is [Run] for effects outside of the database, such as a call of another service: the handler
// runs first, and then the offset is written. A death between the two has the event handled again. The far
// side should recognize it by its Source and ID.
func RunExternal(ctx context.Context, cfg Config, f func(ctx context.Context, e Event) error) error {
	return run(ctx, cfg.single(), func(c Config) (handler, error) {
		h := handler{
			most: 1, external: true,
			call: func(ctx context.Context, _ txn, events []Event) error { return f(ctx, events[0]) },
		}
		if h.begin = beginSQL(c.DB); c.Pool != nil {
			h.begin = beginPgx(c.Pool)
		}
		return h, nil
	})
}

func (c Config) single() Config {
	c.Batch = 1
	return c
}

// errTimeout means that a handler did not return in time.
var errTimeout = errors.New("the handler did not return in time")

// handle calls the handler, and waits for its return. When its time is over, its context is done; a second
// later the connection is closed, which ends a statement that does not know the context.
func (p *partition) handle(ctx context.Context, t txn, events []Event) (err error) {
	for i := range events {
		events[i].Epoch = p.epoch
	}
	ctx, cancel := context.WithTimeout(ctx, p.Timeout)
	defer cancel()
	ctx, end := p.span(ctx, events)
	defer func() { end(err) }()
	done := make(chan error, 1)
	go protect(ctx, done, func() error { return p.handler.call(ctx, t, events) })
	var late <-chan time.Time
	cut := false
	for over := ctx.Done(); ; {
		select {
		case err := <-done:
			if cut && err == nil {
				err = errors.New("its connection was closed")
			}
			if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
				err = fmt.Errorf("%w (%s): %w", errTimeout, p.Timeout, err)
			}
			return err
		case <-over:
			over, late = nil, time.After(time.Second)
		case <-late:
			if late = time.After(time.Minute); t != nil {
				t.cut()
				cut = true
			}
			p.Logger.ErrorContext(ctx, "handler does not return: its partition waits", "consumer", p.Name,
				"partition", p.key, "sequence", events[0].Sequence, "event_type", events[0].Type,
				"hint", "let the handler return when its context is done")
		}
	}
}

// errExit means that a handler ended its goroutine, as testing.T.FailNow does.
var errExit = errors.New("the handler called runtime.Goexit")

// protect sends what f returns. A panic is an error, and so is the end of the goroutine.
func protect(ctx context.Context, done chan<- error, f func() error) {
	err := errExit
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the handler panicked: %v\n%s", r, debug.Stack())
		}
		done <- err
	}()
	if err = ctx.Err(); err == nil {
		err = errExit
		err = f()
	}
}

// outage reports whether an error of the database says nothing about the event: the same transaction may
// succeed a moment later. A statement that was cancelled by its own timeout is counted, because it may take
// as long each time.
func outage(err error) bool {
	var network *pgconn.ConnectError
	if errors.As(err, &network) {
		return true
	}
	switch state := sqlState(err); state {
	case pgerrcode.SerializationFailure, pgerrcode.DeadlockDetected, pgerrcode.LockNotAvailable:
		return true
	case pgerrcode.QueryCanceled, "":
		return false
	default:
		return slices.Contains([]string{"08", "53", "57"}, state[:2])
	}
}

// sqlState is the SQLSTATE of PostgreSQL's error in err's tree, whatever driver it came through, or "".
func sqlState(err error) string {
	var refused interface{ SQLState() string }
	if errors.As(err, &refused) && len(refused.SQLState()) == 5 {
		return refused.SQLState()
	}
	return ""
}
