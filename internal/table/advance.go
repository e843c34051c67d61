package table

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Advance is how far the progress of a table with a journal is to go next, and what it waits for.
type Advance struct {
	to int64
	// writers are the transactions that may still insert rows with ids up to that.
	writers []string
}

// Advance moves the progress of a table with a journal on, where it can: to an id up to which every
// transaction has ended and no row is pending without a deferral. Rows that are due later get one. With
// other marks it does nothing.
//
// An INSERT holds its lock on the table before it draws an id, and so a transaction that holds none when a
// row is seen inserts none with a lesser id: the ids come from a sequence with CACHE 1.
func (db *DB) Advance(ctx context.Context, t *outbox.Table, a *Advance) error {
	if !Journals(t) {
		return nil
	}
	err := db.advance(ctx, t, a)
	if err != nil {
		return fmt.Errorf("advance the journal of %s: %w", t, err)
	}
	return nil
}

func (db *DB) advance(ctx context.Context, t *outbox.Table, a *Advance) error {
	if a.to > 0 {
		now, err := db.writersOf(ctx, t)
		if err != nil {
			return err
		}
		if a.writers = stillOpen(a.writers, now); len(a.writers) > 0 {
			return nil
		}
		if done, err := db.settleTo(ctx, t, a.to); err != nil || !done {
			return err
		}
	}
	a.to = 0
	var to, settled int64
	err := db.QueryRow(ctx, []any{&to, &settled}, journalSQL(t,
		`SELECT coalesce(max(e.{id}), 0), `+settledToSQL+` FROM {table} e`))
	if err == nil && to > settled {
		a.to = to
		a.writers, err = db.writersOf(ctx, t)
	}
	return err
}

// stillOpen are those of the transactions that have not ended. One that is prepared meanwhile gets another
// name: where one of them is gone, every prepared one may be it.
func stillOpen(before, now []string) (open []string) {
	for _, w := range before {
		if slices.Contains(now, w) {
			open = append(open, w)
		}
	}
	if len(open) == len(before) {
		return open
	}
	for _, w := range now {
		if strings.HasPrefix(w, preparedPrefix) && !slices.Contains(open, w) {
			open = append(open, w)
		}
	}
	return open
}

// preparedPrefix begins what pg_locks calls a prepared transaction.
const preparedPrefix = "-1/"

// writersOf are the transactions that hold a lock to write to the table, as pg_locks names them.
func (db *DB) writersOf(ctx context.Context, t *outbox.Table) (writers []string, err error) {
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		rows, _ := conn.Query(ctx, `SELECT DISTINCT l.virtualtransaction::text FROM pg_locks l
			WHERE l.locktype = 'relation' AND l.granted AND l.pid IS DISTINCT FROM pg_backend_pid()
				AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
				AND l.mode IN ('RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
					'AccessExclusiveLock')
				AND l.relation IN (SELECT to_regclass($1) UNION ALL
					SELECT relid FROM pg_partition_tree(to_regclass($1)))`, t.SQL())
		writers, err = pgx.CollectRows(rows, pgx.RowTo[string])
		return err
	})
	return writers, err
}

// mostDeferred bounds how many rows one statement defers.
const mostDeferred = 10_000

// settleTo defers the rows up to an id that are due later, and writes the progress if no other row is
// pending there, of any shard.
func (db *DB) settleTo(ctx context.Context, t *outbox.Table, to int64) (done bool, err error) {
	events := "true" // rows that do not fit are none
	if fits := t.WhereSQL("t"); fits != "" {
		events = fits
	}
	err = db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if t.Layout.Has(outbox.AvailableAt) {
			_, err := conn.Exec(ctx, journalSQL(t, `
				INSERT INTO {deferred} (outbox, id, available_at, aggregate_hash)
				SELECT {outbox}, t.{id}, t.{available}, {hash} FROM {undeferred} t
				WHERE t.{available} > now() AND {events} ORDER BY t.{id} LIMIT $2`,
				"{undeferred}", undeferredToSQL(t, "$1"), "{events}", events), to, mostDeferred)
			if err != nil {
				return err
			}
		}
		tag, err := conn.Exec(ctx, journalSQL(t, `INSERT INTO {progress} AS p (outbox, settled_to)
			SELECT {outbox}, $1::bigint WHERE NOT EXISTS (SELECT FROM {undeferred} t WHERE {events})
			ON CONFLICT (outbox) DO UPDATE
			SET settled_to = greatest(p.settled_to, EXCLUDED.settled_to), updated_at = now()`,
			"{undeferred}", undeferredToSQL(t, "$1"), "{events}", events), to)
		done = tag.RowsAffected() == 1
		return err
	})
	return done, err
}
