package deadletter

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// Outcome is the result for one dead letter. Err is nil where it was retried or discarded. Otherwise the dead
// letter is unchanged, and Err says why.
type Outcome struct {
	ID     int64
	Outbox string
	RowID  string
	Class  string // of the failure that it died of
	Err    error
}

// entry is a dead letter that is to be changed.
type entry struct {
	ID      int64
	Outbox  string
	RowID   string
	Columns []string // of the original row; nil where it is not a JSON object
	Class   string
}

func (l entry) key() int64 { return l.ID }

func (l entry) sameShape(other entry) bool {
	return l.Outbox == other.Outbox && slices.Equal(l.Columns, other.Columns)
}

const entryColumns = `d.dead_letter_id, d.outbox, d.row_id,
	ARRAY(SELECT json_object_keys(CASE WHEN json_typeof(d.original) = 'object' THEN d.original END)),
	split_part(left(coalesce(d.last_error, ''), 64), ':', 1)`

// Retry puts rows back into their outboxes, a few hundred in a transaction, oldest first, and deletes their
// dead letters in the same transaction. A row keeps its id and its values; it has no attempts and is due at
// once. Where a table is append-only and has no row of that id any more, the row gets a new id.
//
// The rows are recorded as held: the WAL may still bring their first INSERT, and so only the table delivers
// them, behind rows that were inserted meanwhile. Where the layout has no column for the record, the WAL
// delivers them.
//
// A row that cannot be put back stays a dead letter: its id is in the table again, its outbox is not
// configured, or the table refuses it. The others go on. Each dead letter that existed when Retry began is
// reported after its transaction, unless another command took it meanwhile. After an error, the reported ones
// stay done: call Retry again. A dry run does the same and rolls back.
func (q *Queue) Retry(ctx context.Context, f Filter, dryRun bool, report func(Outcome)) error {
	err := walk(ctx, q, f, entryColumns, func(page []entry) error {
		return q.change(ctx, page, dryRun, report, q.retry)
	})
	return q.explain(ctx, err, "retry dead letters", append(q.retryNeeds(ctx), q.letters("DELETE"))...)
}

// Discard deletes dead letters for good, a few hundred in a transaction. It reports as [Queue.Retry] does.
func (q *Queue) Discard(ctx context.Context, f Filter, dryRun bool, report func(Outcome)) error {
	err := walk(ctx, q, f, entryColumns, func(page []entry) error {
		return q.change(ctx, page, dryRun, report, q.discard)
	})
	return q.explain(ctx, err, "discard dead letters", q.letters("DELETE"))
}

var errDryRun = errors.New("dry run")

// change runs one transaction and reports its outcomes.
func (q *Queue) change(
	ctx context.Context, page []entry, dryRun bool, report func(Outcome),
	do func(context.Context, pgx.Tx, []entry) ([]Outcome, error),
) error {
	var outcomes []Outcome
	committed := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}
	err := pgx.BeginTxFunc(ctx, q.conn, committed, func(tx pgx.Tx) (err error) {
		if outcomes, err = do(ctx, tx, page); err == nil && dryRun {
			return errDryRun
		}
		if err == nil {
			_, err = tx.Exec(ctx, pg.ShowPath)
		}
		return err
	})
	if err != nil && !errors.Is(err, errDryRun) {
		return err
	}
	for _, o := range outcomes {
		report(o)
	}
	return nil
}

func (q *Queue) discard(ctx context.Context, tx pgx.Tx, page []entry) ([]Outcome, error) {
	rows, _ := tx.Query(ctx, fmt.Sprintf(`
		WITH gone AS (
			DELETE FROM %s WHERE dead_letter_id = ANY($1::bigint[]) RETURNING dead_letter_id
		)
		SELECT dead_letter_id FROM gone WHERE %s`, q.table, pg.OwnPath), ids(page))
	gone, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	return outcomes(page, gone, nil), err
}

// retry keeps the order: only neighbours with the same columns go in one statement.
func (q *Queue) retry(ctx context.Context, tx pgx.Tx, page []entry) (all []Outcome, err error) {
	var tables []*outbox.Table
	for _, l := range page { // before the lock of any row
		t, err := q.target(ctx, tx, l.Outbox)
		if err != nil {
			return nil, err
		}
		if t.check == nil && !slices.Contains(tables, t.table) {
			tables = append(tables, t.table)
		}
	}
	// Marks wait meanwhile.
	if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '5s'`); err != nil {
		return nil, err
	}
	if err := table.LockMoves(ctx, tx, tables...); err != nil {
		return nil, err
	}
	for rest := page; len(rest) > 0; {
		n := 1
		for n < len(rest) && rest[n].sameShape(rest[0]) {
			n++
		}
		t, err := q.target(ctx, tx, rest[0].Outbox)
		if err != nil {
			return nil, err
		}
		some, err := t.take(ctx, tx, rest[:n])
		if err != nil {
			return nil, err
		}
		all, rest = append(all, some...), rest[n:]
	}
	return all, nil
}

func ids(letters []entry) []int64 {
	all := make([]int64, len(letters))
	for i, l := range letters {
		all[i] = l.ID
	}
	return all
}

// outcomes are those of the letters whose ids are among these, each with err.
func outcomes(letters []entry, among []int64, err error) (all []Outcome) {
	for _, l := range letters {
		if slices.Contains(among, l.ID) {
			all = append(all, Outcome{l.ID, l.Outbox, l.RowID, l.Class, err})
		}
	}
	return all
}

// take puts rows with the same columns back in one statement. Where the table refuses that, it tries each
// half, down to the single rows that the table refuses.
func (t *target) take(ctx context.Context, tx pgx.Tx, run []entry) ([]Outcome, error) {
	sql, refusal := t.insertSQL(run[0].Columns)
	if refusal != nil {
		return outcomes(run, ids(run), refusal), nil
	}
	var done []int64
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) (err error) {
		done, err = t.put(ctx, tx, sql, ids(run))
		return err
	})
	switch {
	case err == nil:
		return t.others(ctx, tx, run, done)
	case !rowsFault(err):
		return nil, err
	case len(run) == 1:
		err = hint.Wrap(err, fmt.Sprintf(
			"compare the table's columns and constraints with `walpost dlq show %d`", run[0].ID))
		return outcomes(run, ids(run), err), nil
	}
	first, err := t.take(ctx, tx, run[:len(run)/2])
	if err != nil {
		return nil, err
	}
	second, err := t.take(ctx, tx, run[len(run)/2:])
	return append(first, second...), err
}

var errNotTaken = errors.New("the table did not take the row: a trigger or a rule is in the way")

// rowsFault reports whether the row itself caused the error: others may succeed.
func rowsFault(err error) bool {
	return errors.Is(err, errNotTaken) ||
		pg.InClass(err, pg.DataException, pg.IntegrityConstraintViolation, pg.WithCheckOptionViolation,
			pg.PLpgSQLError)
}

// put moves rows and returns the ids of the deleted dead letters. The DELETE comes first: where two commands
// try the same row, one of them deletes it and moves the row.
func (t *target) put(ctx context.Context, tx pgx.Tx, sql string, letters []int64) (gone []int64, err error) {
	var rows []string
	err = tx.QueryRow(ctx, sql, letters).Scan(&gone, &rows)
	if err == nil {
		_, err = tx.Exec(ctx, pg.HidePath)
	}
	if err != nil {
		return nil, err
	}
	if len(rows) != len(gone) {
		return nil, errNotTaken
	}
	return gone, nil
}

// others adds the outcomes of rows that were not moved because their ids are in the table again. It leaves
// out dead letters that another command took meanwhile.
func (t *target) others(ctx context.Context, tx pgx.Tx, run []entry, done []int64) ([]Outcome, error) {
	all := outcomes(run, done, nil)
	if len(all) == len(run) {
		return all, nil
	}
	rows, _ := tx.Query(ctx, fmt.Sprintf(
		`SELECT dead_letter_id FROM %s WHERE dead_letter_id = ANY($1::bigint[])`, t.letters), ids(run))
	left, err := pgx.CollectRows(rows, pgx.RowTo[int64])
	exists := hint.Errorf("the outbox has taken this id again: compare the two, "+
		"and discard the dead letter or take the row away",
		"a row with this id is in the outbox")
	return append(all, outcomes(run, left, exists)...), err
}
