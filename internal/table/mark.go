package table

import (
	"context"
	"fmt"
	"slices"

	"github.com/walpost/walpost/outbox"
)

// Mark is how a stored row is taken out of the pending ones. Each [outbox.Mark] has one implementation, and
// [MarkOf] is the place that chooses it.
type Mark interface {
	// Stays reports whether a marked row stays in the table, and it is known when it was marked. Only such
	// rows can be found lost and made pending again.
	Stays() bool

	// mark marks rows of t.
	mark(ctx context.Context, db *DB, t *outbox.Table, rows []Row) ([]Verdict, error)
	// source are the places in which statements look for rows of t, and find them with all columns that
	// [outbox.Table.Column] names.
	source(t *outbox.Table) source
	// aggregateHashSQL is the hash by which an index finds recorded rows t of an aggregate.
	aggregateHashSQL(t *outbox.Table) string
	// deadSQL is [DeadSQL].
	deadSQL(t *outbox.Table, alias, ids string) string
	// set is the command that makes assignments to rows of t: those that the CTE "free" names. It returns the
	// id of each.
	set(t *outbox.Table, s *sets) string
	// unmarkSQL makes delivered rows pending again, as held ones: those t that are the same as one of w. It
	// returns the numbers in w of those, with whether the row is locked and stays as it is.
	unmarkSQL(t *outbox.Table, same string) string
	// wakeSQL is [WakeSQL], with the assignments.
	wakeSQL(t *outbox.Table, s *sets) string
	// giveUpSQL is an UPDATE of the parked row with the id $1, after [DB.GiveUp].
	giveUpSQL(t *outbox.Table, attempts int) string
	// skipSQL marks the pending rows of a table and counts them, unless it has done so before. With a journal
	// it is given what [toSkipSQL] has found.
	skipSQL(t *outbox.Table) string
	// deadLetterSQL is a settling statement that makes dead letters of rows, in the table of that name.
	deadLetterSQL(t *outbox.Table, letters string) string
	// keepSQL does so where a row cannot be rendered as a whole: original is what the letter has of it.
	keepSQL(t *outbox.Table, letters, original string) string
}

// source are items of a FROM list, without aliases.
type source struct {
	// pending has at least the pending rows. marked has the delivered ones in the order in which they were.
	// due has the pending ones for statements that go by the time when they are due; where no index does,
	// only the first of them.
	pending, marked, due string
	// all is every row, and markedByID the delivered ones, for statements that ask for some ids: those of an
	// item of a FROM list, its column id. What is said of other rows may be wrong.
	all, markedByID func(ids string) string
	// page is a statement for the last mark of some $2 marked rows from the time $1 on, NULL where these are
	// all; empty where an index has the rows in their order, and a LIMIT does.
	page string
	// first are where the first pending rows are looked for, one by one.
	first []search
	// lock ends a statement that passes over rows that another session is changing.
	lock string
	// free is a further condition of a settling statement, with the same effect, where the row t is not what
	// it changes.
	free string
}

// search is an item of a FROM list that has pending rows. It has them in the order of their ids for each row
// of over, which goes before it in the list.
type search struct{ over, pending string }

func sourceOf(t *outbox.Table) source { return MarkOf(t).source(t) }

// They are asked for with every row: to make them each time would allocate.
var dated, undated Mark = updated{dated: true}, updated{}

// MarkOf is the mark of an outbox.
func MarkOf(t *outbox.Table) Mark {
	switch t.Mark {
	case outbox.MarkDelete:
		return deleted{}
	case outbox.MarkUpdate:
		if t.Layout.Has(outbox.ProcessedAt) {
			return dated
		}
		return undated
	case outbox.MarkJournal:
		return journaled{}
	}
	panic(fmt.Sprintf("table %s: no implementation of mark %q", t, t.Mark))
}

// inRow is what the marks share that change the row itself.
type inRow struct{}

func (inRow) source(t *outbox.Table) source {
	sql := t.SQL()
	return source{
		pending: sql, marked: sql, due: sql,
		all: func(string) string { return sql }, markedByID: func(string) string { return sql },
		first: []search{{pending: sql}},
		lock:  "FOR UPDATE OF t SKIP LOCKED",
	}
}

func (inRow) set(t *outbox.Table, s *sets) string {
	return fmt.Sprintf(`UPDATE %s t SET %s WHERE %s RETURNING t.%s AS id`,
		t.SQL(), s.sql(), FreeSQL(t), t.Column(outbox.ID))
}

// markBy marks rows with a command over the CTE "free", which returns the id of each row that it has marked.
func (inRow) markBy(
	ctx context.Context, db *DB, t *outbox.Table, rows []Row, command func(*outbox.Table) string,
) ([]Verdict, error) {
	by, params := *t, (*args).known
	if t.PartitionKey != outbox.ID && haveKeys(rows) {
		params = (*args).keyed
	} else {
		by.PartitionKey = outbox.ID
	}
	sql := db.markSQL(&by, func(t *outbox.Table) string { return markSQL(t, command(t)) })
	return db.settle(ctx, t, rows, sql, params)
}

// markSQL is the statement that marks rows of a table, which is made once.
func (db *DB) markSQL(t *outbox.Table, makeSQL func(*outbox.Table) string) string {
	sql, made := db.marks.Load(*t) // by its facts: they may change
	if !made {
		sql, _ = db.marks.LoadOrStore(*t, makeSQL(t))
	}
	return sql.(string)
}

// updated is outbox.MarkUpdate: processed_at is set, or the status, or both.
type updated struct {
	inRow
	dated bool
}

func (u updated) Stays() bool { return u.dated }

func (u updated) mark(ctx context.Context, db *DB, t *outbox.Table, rows []Row) ([]Verdict, error) {
	return u.markBy(ctx, db, t, rows, updateSQL)
}

func updateSQL(t *outbox.Table) string {
	s := sets{table: t}
	s.add(outbox.ProcessedAt, "now()")
	s.state(outbox.Done)
	if t.Layout.Records() { // a delivered row is not held
		s.add(outbox.LastError, fmt.Sprintf("CASE WHEN t.%[1]s LIKE '%[2]s%%' THEN NULL ELSE t.%[1]s END",
			t.Column(outbox.LastError), Held))
	}
	// A row of which a trigger has taken the mark back is not marked: it would be sent again and again.
	return fmt.Sprintf(`UPDATE %s t SET %s %s AND %s RETURNING CASE WHEN %s THEN t.%s END AS id`,
		t.SQL(), s.sql(), takeSQL(t, "FROM"), UnmarkedSQL(t, "t"), MarkedSQL(t, "t"), t.Column(outbox.ID))
}

// deleted is outbox.MarkDelete.
type deleted struct{ inRow }

func (deleted) Stays() bool { return false }

func (d deleted) mark(ctx context.Context, db *DB, t *outbox.Table, rows []Row) ([]Verdict, error) {
	return d.markBy(ctx, db, t, rows, deleteSQL)
}

func deleteSQL(t *outbox.Table) string {
	return fmt.Sprintf(`DELETE FROM %s t %s RETURNING t.%s AS id`,
		t.SQL(), takeSQL(t, "USING"), t.Column(outbox.ID))
}

// Journals reports whether marks stand in the journal.
func Journals(t *outbox.Table) bool { return t.Mark == outbox.MarkJournal }

// Keeps reports whether a marked row stays in the table and is changed, be it without a time.
func Keeps(t *outbox.Table) bool { return t.Mark == outbox.MarkUpdate }

// Deletes reports whether a relay deletes rows: delivered ones, or dead ones where nothing else says that
// they are dead.
func Deletes(t *outbox.Table) bool {
	return t.Mark == outbox.MarkDelete || Keeps(t) && t.Layout.States[outbox.Dead] == ""
}

// Changes reports whether a relay changes rows of the table, or locks them.
func Changes(t *outbox.Table) bool { return Keeps(t) || Deletes(t) }

// UpdateColumns are the columns on which a relay needs UPDATE, where it changes rows: those that it writes,
// or one, because locking rows takes the privilege on one at least.
func UpdateColumns(t *outbox.Table) (columns []string) {
	for _, f := range Writes(t) {
		columns = append(columns, t.Layout.Columns[f])
	}
	if len(columns) == 0 {
		columns = append(columns, t.Layout.Columns[outbox.ID])
	}
	return columns
}

// Writes are the fields that a relay updates.
func Writes(t *outbox.Table) (fields []outbox.Field) {
	if Keeps(t) {
		fields = t.Layout.MarkFields()
	}
	if Changes(t) {
		for _, f := range t.Layout.RecordFields() {
			if !slices.Contains(fields, f) {
				fields = append(fields, f)
			}
		}
	}
	return fields
}
