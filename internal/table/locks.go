package table

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// IsLocked reports whether a statement waited in vain for a lock of another session.
func IsLocked(err error) bool { return pg.Code(err) == pgerrcode.LockNotAvailable }

// TableBlocker describes the session whose lock keeps statements over t from being done, or "" where none is
// seen. That is a lock on the outbox or on a table of walpost's, or one on rows of the journal's tables or of
// the dead letters: only walpost and operators lock rows there, and the oldest transaction is named.
func (db *DB) TableBlocker(ctx context.Context, t *outbox.Table) (who string, err error) {
	tables, rows := []string{t.SQL()}, []string{db.own.deadLetters}
	if Journals(t) {
		rows = append(rows, t.Journal.Entries, t.Journal.Deferred, t.Journal.Known)
	}
	return db.blocker(ctx, tables, rows)
}

// blocker looks for locks on tables, and for locks on tables or rows that are only walpost's.
func (db *DB) blocker(ctx context.Context, tables, rows []string) (who string, err error) {
	err = db.QueryRow(ctx, []any{&who}, `
		WITH named AS (
			SELECT to_regclass(n)::oid AS id, own
			FROM (SELECT n, false AS own FROM unnest($1::text[]) n
				UNION ALL SELECT n, true FROM unnest($2::text[]) n) x
		), tables AS (
			SELECT id, own FROM named
			UNION ALL SELECT i.inhrelid, own FROM named JOIN pg_inherits i ON i.inhparent = id
		)
		SELECT CASE WHEN a.pid IS NULL THEN 'a prepared transaction, see pg_prepared_xacts'
				ELSE `+pg.DescribeSession("a")+` END || format('; it %s %s on %s',
				CASE WHEN l.granted THEN 'has' ELSE 'waits for' END,
				l.mode, l.relation::regclass)
		FROM pg_locks l JOIN tables ON id = l.relation LEFT JOIN pg_stat_activity a USING (pid)
		WHERE l.locktype = 'relation' AND l.pid IS DISTINCT FROM pg_backend_pid()
			AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
			AND (l.mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock',
					'AccessExclusiveLock')
				OR own AND l.mode IN ('RowShareLock', 'RowExclusiveLock'))
		ORDER BY l.mode IN ('RowShareLock', 'RowExclusiveLock'), l.granted DESC, a.xact_start
		LIMIT 1`,
		tables, rows)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return "", fmt.Errorf("look for the lock's holder: %w", err)
	}
	return who, nil
}
