package table

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/outbox"
)

// Row is a row to be settled in its table.
type Row struct {
	Ref outbox.Ref
	// XID is the inserting transaction where the WAL told it; zero where the row
	// was seen in the table.
	XID uint32
	// Polled: the row was read from the table with so many attempts behind it.
	// Where it is not set, a failure is recorded only in a row that has no record.
	Polled   bool
	Attempts int
	// Bytes is about how much its columns hold, zero where that is not known.
	Bytes int
	// Key is the row's value of its table's partition key; "" where that is not known.
	Key string
	// Failure is what is recorded of a row that cannot be sent. For NoteInserted it is the processed_at that
	// the row was inserted with.
	Failure string
	// Wait is the least time until a row that failed is tried again.
	Wait time.Duration
	// Omitted is what the row has where its content is not known (outbox.UnknownHash): values of these
	// lengths. Without any of them the row is known by its id alone.
	Omitted []outbox.Omitted
	// Line: of the rows that Park or Hold is given with the same number, none is
	// recorded before one that stands earlier.
	Line int
}

// RowOf is an event's row.
func RowOf(ev *outbox.Event) Row {
	r := Row{Ref: ev.Ref(), XID: ev.XID, Bytes: ev.Size(), Omitted: ev.Omitted}
	for _, o := range ev.Omitted {
		r.Bytes += o.Size
	}
	return r
}

// large reports whether the row is too large to be moved to the dead letters.
func (r *Row) large() bool {
	return slices.ContainsFunc(r.Omitted, func(o outbox.Omitted) bool { return o.Size > mostMoved })
}

// lengths is the row's Omitted as an array, a length for each field from TenantID on.
func (r *Row) lengths() string {
	var n [outbox.LastHeader]string
	for i := range n {
		n[i] = "NULL"
	}
	for _, o := range r.Omitted {
		if o.Field != outbox.ID {
			n[o.Field-outbox.TenantID] = strconv.Itoa(o.Size)
		}
	}
	return "{" + strings.Join(n[:], ",") + "}"
}

// Retry says how often a row that fails is tried.
type Retry struct {
	// Backoff is the wait after the first failure; the n-th waits n times as long,
	// up to eight times.
	Backoff time.Duration
	// MaxAttempts: a row that fails once more becomes a dead letter.
	MaxAttempts int
}

// Verdict is what a settling statement did with a row.
type Verdict uint8

const (
	// Done: the row carries the mark, or it is gone, or it is another row by now.
	// Nothing is left to do for it.
	Done Verdict = iota
	// Locked: somebody holds a lock on the row. Try again.
	Locked
	// Invisible: the row's transaction is flushed but not visible yet. Try again.
	Invisible
	// Gone is said by Mark of rows that the WAL has told: the row's transaction is visible, and no row
	// has its id. Nothing is left to do for it. [outbox.MarkJournal] looks for some of the rows only.
	Gone
)

// Mark takes stored rows out of the pending ones. A row is marked only while
// its content is still what was stored: an id that came again, or a row that was
// changed meanwhile, is another message.
func (db *DB) Mark(ctx context.Context, t *outbox.Table, rows []Row) ([]Verdict, error) {
	return MarkOf(t).mark(ctx, db, t, rows)
}

// Park records a failure of the row's own in the row: attempts + 1, last_error,
// and a later available_at. A row that has failed too often is moved to the dead
// letters instead, in the statement that deletes it; so is every row whose layout
// has no columns for a failure.
//
// A row that is recorded already is left alone when the WAL brings it again: that
// is no attempt.
func (db *DB) Park(ctx context.Context, t *outbox.Table, rows []Row, retry Retry) ([]Verdict, error) {
	isDead := func(r Row) bool { return !t.Layout.Records() || r.Attempts >= retry.MaxAttempts }
	rec := db.newRecorder(t)
	for len(rows) > 0 {
		dead, n := isDead(rows[0]), 1
		for n < len(rows) && isDead(rows[n]) == dead {
			n++
		}
		var err error
		if dead {
			err = rec.moveToDeadLetters(ctx, rows[:n])
		} else {
			err = rec.run(ctx, rows[:n], parkSQL(t, retry.Backoff), nil)
		}
		if err != nil {
			return nil, err
		}
		rows = rows[n:]
	}
	return rec.verdicts, nil
}

// Hold records in rows without a record that they wait behind a failed row.
func (db *DB) Hold(ctx context.Context, t *outbox.Table, rows []Row) ([]Verdict, error) {
	rec := db.newRecorder(t)
	err := rec.run(ctx, rows, holdSQL(t), nil)
	return rec.verdicts, err
}

// recorder records rows of one table, in as many statements as it takes, and keeps their lines:
// where a row is locked or not visible yet, later ones of its line are left for later.
type recorder struct {
	db       *DB
	table    *outbox.Table
	verdicts []Verdict // of the rows so far
	stuck    map[int]bool
}

func (db *DB) newRecorder(t *outbox.Table) *recorder {
	return &recorder{db: db, table: t, stuck: map[int]bool{}}
}

// run records rows with a statement. alone is told of one that makes it fail, nil: that is the error.
func (rec *recorder) run(ctx context.Context, rows []Row, sql string, alone func(Row, error) error) error {
	err := portions[Row]{
		size: &rec.db.portion, bytes: rowBytes,
		spoils: func(err error) bool { return isUnreadable(err) || mayBeLess(err) },
		do:     func(rows []Row) error { return rec.try(ctx, rows, sql) },
		alone: func(row Row, err error) error {
			switch {
			case rec.db.isAnother(ctx, rec.table, row, err):
				rec.verdicts = append(rec.verdicts, Done)
				return nil
			case alone == nil:
				return err
			}
			return alone(row, err)
		},
	}.run(rows)
	if err != nil {
		return fmt.Errorf("record rows of %s: %w", rec.table, rec.db.explainRefusal(ctx, rec.table, err))
	}
	return nil
}

// try records rows in one transaction, which takes back what was done to later ones of a line that
// turns out to be stuck, and begins again without them.
func (rec *recorder) try(ctx context.Context, rows []Row, sql string) error {
	verdicts := make([]Verdict, len(rows))
	stuck := maps.Clone(rec.stuck)
	err := rec.db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
		var at []int // where the rows stand that are tried
		for n, row := range rows {
			if verdicts[n] = Locked; !stuck[row.Line] {
				at = append(at, n)
			}
		}
		for len(at) > 0 {
			some := make([]Row, len(at))
			for i, n := range at {
				some[i] = rows[n]
			}
			tx, err := conn.Begin(ctx)
			if err != nil {
				return err
			}
			var got []Verdict
			if err = LockMoves(ctx, tx, rec.table); err == nil {
				got, err = rec.db.settleIn(ctx, tx, some, sql, (*args).all)
			}
			if err != nil {
				return errors.Join(err, tx.Rollback(ctx))
			}
			var keep []int
			now, undo := map[int]bool{}, false
			for i, n := range at {
				switch line := rows[n].Line; {
				case now[line]:
					undo = undo || got[i] == Done
					verdicts[n] = Locked
				case got[i] != Done:
					verdicts[n], now[line], stuck[line] = got[i], true, true
				default:
					verdicts[n] = Done
					keep = append(keep, n)
				}
			}
			if !undo {
				return tx.Commit(ctx)
			}
			if err := tx.Rollback(ctx); err != nil {
				return err
			}
			at = keep
		}
		return nil
	})
	if err == nil {
		rec.verdicts, rec.stuck = append(rec.verdicts, verdicts...), stuck
	}
	return err
}

func rowBytes(r Row) int { return r.Bytes }

// settle runs a statement over rows of one table and says what became of each. What it
// reports of a portion of them stems from one snapshot.
func (db *DB) settle(
	ctx context.Context, t *outbox.Table, rows []Row, sql string, params func(*args) []any,
) ([]Verdict, error) {
	verdicts := make([]Verdict, 0, len(rows))
	err := portions[Row]{
		size: &db.portion, bytes: rowBytes,
		do: func(rows []Row) error {
			return db.Use(ctx, func(ctx context.Context, conn *pgx.Conn) error {
				some, err := db.settleIn(ctx, conn, rows, sql, params)
				if err == nil {
					verdicts = append(verdicts, some...)
				}
				return err
			})
		},
		alone: func(row Row, err error) error { // a trigger may have raised it
			if !db.isAnother(ctx, t, row, err) {
				return err
			}
			verdicts = append(verdicts, Done)
			return nil
		},
	}.run(rows)
	if err != nil {
		return nil, fmt.Errorf("settle rows of %s: %w", t, db.explainRefusal(ctx, t, err))
	}
	return verdicts, nil
}

// isAnother reports whether a statement has failed at a row for what somebody has changed it to: it is
// not the row that was to be settled.
func (db *DB) isAnother(ctx context.Context, t *outbox.Table, row Row, err error) bool {
	if !isUnreadable(err) || row.Ref.Hash == outbox.UnknownHash {
		return false
	}
	states, err := db.LookUp(ctx, t, []Row{row})
	return err == nil && states[0].Exists && !states[0].Same
}

type queryer interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func (db *DB) settleIn(
	ctx context.Context, q queryer, rows []Row, sql string, params func(*args) []any,
) ([]Verdict, error) {
	verdicts := make([]Verdict, len(rows))
	// An error of Query comes again from its rows.
	result, _ := q.Query(ctx, sql, params(db.args(rows))...)
	var ord int
	var v int // pgx scans a type with a name by reflection, and allocates for each row
	_, err := pgx.ForEachRow(result, []any{&ord, &v}, func() error {
		verdicts[ord-1] = Verdict(v)
		return nil
	})
	return verdicts, err
}

// args are a settling statement's parameters, an array each. One that no row has
// anything in is NULL.
type args struct {
	ids, hashes, xids, keys, failures array
	attempts                          array // NULL where the WAL brought the row
	waits                             array // NULL for none
	lengths                           array // NULL where nothing is omitted
}

// known are the parameters of [wantKnown].
func (a *args) known() []any {
	return []any{a.ids.value(), a.hashes.value(), a.xids.value()}
}

// keyed are the parameters of [wantKeyed].
func (a *args) keyed() []any { return append(a.known(), a.keys.value()) }

// all are the parameters of [wantAll].
func (a *args) all() []any {
	return append(a.known(), a.failures.value(), a.attempts.value(), a.waits.value(), a.lengths.value())
}

// haveKeys reports whether the partition key of every row is known.
func haveKeys(rows []Row) bool {
	return !slices.ContainsFunc(rows, func(r Row) bool { return r.Key == "" })
}

func (db *DB) args(rows []Row) *args {
	n := len(rows)
	a := &args{}
	a.ids.grow(n)
	a.hashes.grow(3 * n)
	a.xids.grow(n)
	var xid string
	for i := range rows {
		r := &rows[i]
		a.ids.string(r.Ref.ID)
		a.hashes.int(int64(r.Ref.Hash))
		switch {
		case r.XID == 0:
			a.xids.null()
		case i == 0 || r.XID != rows[i-1].XID:
			xid = strconv.FormatUint(db.FullXID(r.XID), 10)
			fallthrough
		default:
			a.xids.string(xid)
		}
		if r.Key == "" {
			a.keys.null()
		} else {
			a.keys.string(r.Key)
		}
		if r.Failure == "" {
			a.failures.null()
		} else {
			a.failures.string(r.Failure)
		}
		if r.Polled {
			a.attempts.int(int64(r.Attempts))
		} else {
			a.attempts.null()
		}
		if r.Wait > 0 {
			// Before PostgreSQL 15 each of an interval's fields has 32 bits.
			seconds, micros := r.Wait/time.Second, r.Wait%time.Second/time.Microsecond
			a.waits.string(fmt.Sprintf("%d.%06d seconds", seconds, micros))
		} else {
			a.waits.null()
		}
		if r.Omitted != nil {
			a.lengths.string(r.lengths())
		} else {
			a.lengths.null()
		}
	}
	return a
}
