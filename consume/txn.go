package consume

import (
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// txn is a transaction with the handler's driver. All parameters are texts, integers or bytes, which every
// driver and every mode of it can send.
type txn interface {
	// query calls each, which may be nil, with every row.
	query(ctx context.Context, sql string, args []any, each func(scan func(...any) error) error) error
	commit(ctx context.Context) error
	// end rolls back, after a commit it does nothing, and returns the connection.
	end()
	// usable reports why the transaction cannot be committed.
	usable() error
	// lost reports whether the connection is. It is not called after end.
	lost() bool
	// cut ends the connection under a handler that does not return. It may be called at any time.
	cut()
}

var (
	// errEnded means that a handler ended the transaction by SQL, and what it had changed may be committed.
	errEnded = errors.New("the handler ended the transaction")
	// errAborted means that a handler did not return the error of a statement.
	errAborted = errors.New("a statement failed, and the handler did not return its error")
	// errOpen means that a handler did not read or close a query's rows.
	errOpen = errors.New("the handler left the rows of a query open")
)

// pgxTxn is a transaction on a connection of a pool.
type pgxTxn struct {
	pgx.Tx
	conn *pgxpool.Conn
}

func beginPgx(pool *pgxpool.Pool) func(context.Context) (txn, error) {
	return func(ctx context.Context) (txn, error) {
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return nil, err
		}
		tx, err := conn.BeginTx(ctx, pgx.TxOptions{AccessMode: pgx.ReadWrite})
		if err != nil {
			conn.Release()
			return nil, err
		}
		return &pgxTxn{tx, conn}, nil
	}
}

func (t *pgxTxn) query(
	ctx context.Context, sql string, args []any, each func(scan func(...any) error) error,
) error {
	rows, err := t.Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	defer rows.Close()
	return eachRow(rows, each)
}

func (t *pgxTxn) commit(ctx context.Context) error { return t.Commit(ctx) }

func (t *pgxTxn) end() {
	rollback(t.Rollback)
	t.conn.Release()
}

func (t *pgxTxn) usable() error {
	if t.Conn().PgConn().IsBusy() {
		return errOpen
	}
	switch t.Conn().PgConn().TxStatus() {
	case 'I':
		return errEnded
	case 'E':
		return errAborted
	}
	return nil
}

func (t *pgxTxn) lost() bool { return t.Conn().IsClosed() }

func (t *pgxTxn) cut() { _ = t.Conn().PgConn().Conn().Close() }

// rollback fails where the connection is lost, which rolls back, too.
func rollback(f func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), statementTimeout)
	defer cancel()
	_ = f(ctx)
}

// sqlTxn is a transaction of database/sql. Its connection ends with its context.
type sqlTxn struct {
	*sql.Tx
	cancel     func()
	committing bool
}

func beginSQL(db *sql.DB) func(context.Context) (txn, error) {
	return func(ctx context.Context) (txn, error) {
		own, cancel := context.WithCancel(context.WithoutCancel(ctx))
		stop := context.AfterFunc(ctx, cancel)
		tx, err := db.BeginTx(own, nil)
		if !stop() && err == nil {
			err = ctx.Err()
			_ = tx.Rollback()
		}
		if err != nil {
			cancel()
			return nil, err
		}
		return &sqlTxn{Tx: tx, cancel: cancel}, nil
	}
}

func (t *sqlTxn) query(
	ctx context.Context, text string, args []any, each func(scan func(...any) error) error,
) error {
	rows, err := t.QueryContext(ctx, text, args...)
	if errors.Is(err, sql.ErrTxDone) {
		return errEnded
	} else if err != nil {
		return err
	}
	defer rows.Close() //nolint:errcheck // rows.Err has it
	return eachRow(rows, each)
}

// eachRow reads the rows of either driver.
func eachRow(rows interface {
	Next() bool
	Scan(...any) error
	Err() error
}, each func(scan func(...any) error) error,
) error {
	for rows.Next() {
		if each == nil {
			continue
		}
		if err := each(rows.Scan); err != nil {
			return err
		}
	}
	return rows.Err()
}

// commit ends with ctx, which the driver does not see.
func (t *sqlTxn) commit(ctx context.Context) error {
	defer context.AfterFunc(ctx, t.cancel)()
	t.committing = true
	return t.Commit()
}

func (t *sqlTxn) end() {
	defer time.AfterFunc(statementTimeout, t.cancel).Stop()
	_ = t.Rollback()
	t.cancel()
}

// usable is answered by the next statement: database/sql does not show a transaction's state.
func (t *sqlTxn) usable() error { return nil }

// lost asks the server: an error that has no SQLSTATE is not the server's. After a COMMIT nothing can be
// asked.
func (t *sqlTxn) lost() bool {
	if t.committing {
		return true
	}
	ctx, cancel := context.WithTimeout(context.Background(), statementTimeout)
	defer cancel()
	_, err := t.ExecContext(ctx, `SELECT 1`)
	return err != nil && !errors.Is(err, sql.ErrTxDone) && sqlState(err) == ""
}

func (t *sqlTxn) cut() { t.cancel() }

// handlerTx is the transaction as a handler of pgx gets it. The end of the transaction closes it.
type handlerTx struct{ pgx.Tx }

var errNotYours = errors.New("consume ends the transaction when the handler returns")

func (handlerTx) Commit(context.Context) error   { return errNotYours }
func (handlerTx) Rollback(context.Context) error { return errNotYours }
