package table

import (
	"fmt"
	"slices"

	"github.com/walpost/walpost/outbox"
)

// Mark is how a stored row is taken out of the pending ones. Each [outbox.Mark] has one implementation, and
// [MarkOf] is the place that chooses it.
type Mark interface {
	// InTable reports whether the table holds a row until it is marked. Where it does not, only the WAL shows
	// the row: there is nothing to mark, record, search or look up.
	InTable() bool
	// Stays reports whether a marked row stays in the table and says when it was marked. Only such rows can
	// be archived, and only they can be found lost and made pending again.
	Stays() bool
	// SQL is the command that marks rows of t: those that [FreeSQL] names. It returns the id of each row that
	// it has marked. It is "" where the table does not hold the rows.
	SQL(t *outbox.Table) string
}

// MarkOf is the mark of an outbox.
func MarkOf(t *outbox.Table) Mark {
	switch t.Mark {
	case outbox.MarkNone:
		return none{}
	case outbox.MarkDelete:
		return deleted{}
	case outbox.MarkUpdate:
		return updated{dated: t.Layout.Has(outbox.ProcessedAt)}
	}
	panic(fmt.Sprintf("table %s: no implementation of mark %q", t, t.Mark))
}

// updated is outbox.MarkUpdate: processed_at is set, or the status, or both.
type updated struct{ dated bool }

func (updated) InTable() bool { return true }
func (u updated) Stays() bool { return u.dated }

func (updated) SQL(t *outbox.Table) string {
	s := sets{table: t}
	s.add(outbox.ProcessedAt, "now()")
	s.state(outbox.Done)
	if t.Layout.Records() { // a delivered row is not held
		s.add(outbox.LastError, fmt.Sprintf("CASE WHEN t.%[1]s LIKE '%[2]s%%' THEN NULL ELSE t.%[1]s END",
			t.Column(outbox.LastError), Held))
	}
	// A row of which a trigger has taken the mark back is not marked: it would be sent again and again.
	return fmt.Sprintf(`UPDATE %s t SET %s WHERE %s AND %s RETURNING CASE WHEN %s THEN t.%s END AS id`,
		t.SQL(), s.sql(), FreeSQL(t), UnmarkedSQL(t, "t"), MarkedSQL(t, "t"), t.Column(outbox.ID))
}

// deleted is outbox.MarkDelete.
type deleted struct{}

func (deleted) InTable() bool { return true }
func (deleted) Stays() bool   { return false }

func (deleted) SQL(t *outbox.Table) string {
	return fmt.Sprintf(`DELETE FROM %s t WHERE %s RETURNING t.%s AS id`,
		t.SQL(), FreeSQL(t), t.Column(outbox.ID))
}

// none is outbox.MarkNone: the producer inserts and deletes the row in one transaction.
type none struct{}

func (none) InTable() bool            { return false }
func (none) Stays() bool              { return false }
func (none) SQL(*outbox.Table) string { return "" }

// Keeps reports whether a marked row stays in the table, be it without a time.
func Keeps(t *outbox.Table) bool { return t.Mark == outbox.MarkUpdate }

// Deletes reports whether a relay deletes rows: delivered ones, or dead ones where their status does not say
// so.
func Deletes(t *outbox.Table) bool {
	return t.Mark == outbox.MarkDelete || MarkOf(t).InTable() && t.Layout.States[outbox.Dead] == ""
}

// Writes are the fields that a relay updates.
func Writes(t *outbox.Table) (fields []outbox.Field) {
	if Keeps(t) {
		fields = t.Layout.MarkFields()
	}
	if MarkOf(t).InTable() {
		for _, f := range t.Layout.RecordFields() {
			if !slices.Contains(fields, f) {
				fields = append(fields, f)
			}
		}
	}
	return fields
}
