package table

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// What became of a row of a table with a journal stands in three tables: entries, deferrals, and the
// progress. A statement that looks at one of them and writes another would not see what another statement
// writes meanwhile, and a row could have an entry and a deferral, which nothing removes, or none of both
// below the progress, which no search finds. So each takes a lock of outbox_known before its snapshot:
//
//	alone     EXCLUSIVE      defers rows that are due later (deferLater), records failures and holds, makes
//	                         dead letters (recorder), makes rows pending again (Unmark), skips rows (Begin),
//	                         retries dead letters
//	beside    ROW SHARE      marks rows (entrySQL), deletes old ones (DeleteJournaled)
//	progress  ROW EXCLUSIVE  moves the progress (settledSQL), or makes it void (Know, SearchAgain)
//
// One that is alone waits for all others, and they for it. What is left are these pairs:
//
//	beside, beside      Marks of one row are two entries, and both say the same. What is deleted has an old
//	                    entry, and another one changes nothing.
//	beside, progress    A mark makes a row that the progress takes for pending a marked one. Only rows are
//	                    deleted that every progress has passed; one that begins meanwhile finds none.
//	progress, progress  A row's progress becomes less by each of them, unless it became void: then
//	                    settledSQL writes nothing. One that was void already has other partitions, or the
//	                    same.
//	give up, record     GiveUp takes no lock: the failure of an attempt from before it is not recorded,
//	                    because the deferral has other attempts once it is locked.
//	give up, others     It changes a deferral, and a mark that deletes it waits for that, or was first.
//	forget, others      ForgetDeferred deletes deferrals of rows that are not there. All others read rows.
//	drop, others        A partition is dropped behind a lock of the table: whoever reads a row of it was
//	                    first. forgetDropped locks the entries that it changes.
//
// Who is alone waits for locks of rows' tables before, and not while all others wait. VACUUM of outbox_known,
// which has a few rows, is short, and pg_dump takes a lesser lock.

// LockMoves has a transaction be alone in moving ids, see above. It is to change rows of these tables only;
// those with other marks are left out.
func LockMoves(ctx context.Context, tx pgx.Tx, tables ...*outbox.Table) error {
	var locks []string
	known := ""
	for _, t := range tables {
		if Journals(t) {
			locks, known = append(locks, `LOCK TABLE `+t.SQL()+` IN ACCESS SHARE MODE`), t.Journal.Known
		}
	}
	if len(locks) == 0 {
		return nil
	}
	locks = append(locks, `LOCK TABLE `+known+` IN EXCLUSIVE MODE`)
	_, err := tx.Exec(ctx, strings.Join(locks, "; "))
	return err
}

// besideSQL is true, and takes the lock of a statement that is not alone.
const besideSQL = `NOT EXISTS (SELECT FROM {known} WHERE false FOR KEY SHARE)`

// moving runs a statement that is alone, or of other marks.
func (db *DB) moving(ctx context.Context, t *outbox.Table, do func(context.Context, queryer) error) error {
	return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		if !Journals(t) {
			return do(ctx, conn)
		}
		return pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error {
			err := LockMoves(ctx, tx, t)
			if err == nil {
				err = do(ctx, tx)
			}
			return err
		})
	})
}
