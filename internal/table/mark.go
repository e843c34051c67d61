package table

import (
	"fmt"

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
	// Writes are the fields that the mark updates.
	Writes() []outbox.Field
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
		return updated{}
	}
	panic(fmt.Sprintf("table %s: no implementation of mark %q", t, t.Mark))
}

// updated is outbox.MarkUpdate: processed_at is set.
type updated struct{}

func (updated) InTable() bool          { return true }
func (updated) Stays() bool            { return true }
func (updated) Writes() []outbox.Field { return []outbox.Field{outbox.ProcessedAt} }

func (updated) SQL(t *outbox.Table) string {
	set := t.Column(outbox.ProcessedAt) + " = now()"
	if t.Layout.Records() { // a delivered row is not held
		set += fmt.Sprintf(", %[1]s = CASE WHEN t.%[1]s LIKE '%[2]s%%' THEN NULL ELSE t.%[1]s END",
			t.Column(outbox.LastError), Held)
	}
	// A row of which a trigger has taken the mark back is not marked: it would be sent again and again.
	return fmt.Sprintf(`UPDATE %s t SET %s WHERE %s AND %s
		RETURNING CASE WHEN t.%s IS NOT NULL THEN t.%s END AS id`,
		t.SQL(), set, FreeSQL(t), UnmarkedSQL(t, "t"), t.Column(outbox.ProcessedAt), t.Column(outbox.ID))
}

// deleted is outbox.MarkDelete.
type deleted struct{}

func (deleted) InTable() bool          { return true }
func (deleted) Stays() bool            { return false }
func (deleted) Writes() []outbox.Field { return nil }

func (deleted) SQL(t *outbox.Table) string {
	return fmt.Sprintf(`DELETE FROM %s t WHERE %s RETURNING t.%s AS id`,
		t.SQL(), FreeSQL(t), t.Column(outbox.ID))
}

// none is outbox.MarkNone: the producer inserts and deletes the row in one transaction.
type none struct{}

func (none) InTable() bool            { return false }
func (none) Stays() bool              { return false }
func (none) Writes() []outbox.Field   { return nil }
func (none) SQL(*outbox.Table) string { return "" }
