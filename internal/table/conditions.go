package table

import (
	"fmt"
	"slices"
	"strings"

	"github.com/walpost/walpost/outbox"
)

// PendingSQL is the condition under which a row still waits to be delivered, by this relay.
func PendingSQL(t *outbox.Table, alias string) string {
	return t.PendingSQL(alias) + FilterSQL(t, alias)
}

// FilterSQL narrows a condition to the rows that are this relay's.
func FilterSQL(t *outbox.Table, alias string) string {
	if s := t.FilterSQL(alias); s != "" {
		return " AND " + s
	}
	return ""
}

// UnmarkedSQL is the condition that a row is neither delivered nor dead, in words that the index of recorded
// rows answers to, and no other partial index does. A query with it finds a row by its id, or by its
// aggregate.
func UnmarkedSQL(t *outbox.Table, alias string) string {
	if alias != "" {
		alias += "."
	}
	switch l := &t.Layout; {
	case l.Has(outbox.Status):
		status := alias + t.Column(outbox.Status)
		differs := status + " <> " + outbox.QuoteLiteral(l.States[outbox.Done])
		if l.States[outbox.Dead] != "" {
			differs += " AND " + status + " <> " + outbox.QuoteLiteral(l.States[outbox.Dead])
		}
		return "coalesce(" + differs + ", true)"
	case l.Has(outbox.ProcessedAt):
		return "num_nulls(" + alias + t.Column(outbox.ProcessedAt) + ") = 1"
	}
	return "true"
}

// MarkedSQL is the condition that a row is delivered.
func MarkedSQL(t *outbox.Table, alias string) string {
	if t.Layout.Has(outbox.Status) {
		return stateSQL(t, alias, outbox.Done)
	}
	return fmt.Sprintf("%s.%s IS NOT NULL", alias, t.Column(outbox.ProcessedAt))
}

// DeadSQL is the condition that a row that is still in its table is dead. ids is an item of a FROM list whose
// column id has the ids of all rows that the statement asks about.
func DeadSQL(t *outbox.Table, alias, ids string) string { return MarkOf(t).deadSQL(t, alias, ids) }

// deadSQL implements Mark.
func (inRow) deadSQL(t *outbox.Table, alias, _ string) string {
	if t.Layout.States[outbox.Dead] == "" {
		return "false"
	}
	return stateSQL(t, alias, outbox.Dead)
}

// stateSQL is the condition that the status column says so of a row.
func stateSQL(t *outbox.Table, alias string, s outbox.State) string {
	return fmt.Sprintf("(%s.%s = %s) IS TRUE",
		alias, t.Column(outbox.Status), outbox.QuoteLiteral(t.Layout.States[s]))
}

// FreeSQL is the condition under which a row is to be changed: it is one of those that the CTE "free" has
// locked. The id alone does not identify it: where ids are not unique, as in a partitioned table, another
// row may have the same one. The id is for the index, and IS TRUE keeps IN from becoming a join.
func FreeSQL(t *outbox.Table) string {
	return fmt.Sprintf("t.%s = ANY (ARRAY(SELECT f.id FROM free f)) "+
		"AND ((t.tableoid, t.ctid) IN (SELECT f.place, f.at FROM free f)) IS TRUE", t.Column(outbox.ID))
}

// comesByTime reports whether the ids do not tell which row came first, and a time does.
func comesByTime(t *outbox.Table) bool { return !Counts(t.IDType) && t.Layout.Has(outbox.OccurredAt) }

// Ordered reports whether the rows of a table can be read in the order in which they came.
func Ordered(t *outbox.Table) bool { return Counts(t.IDType) || comesByTime(t) }

// orderSQL lists what rows are sorted by, so that they come in the order in which they were written.
func orderSQL(t *outbox.Table, alias string) string {
	id := alias + "." + t.Column(outbox.ID)
	if comesByTime(t) {
		return fmt.Sprintf("%s.%s, %s", alias, t.Column(outbox.OccurredAt), id)
	}
	return id
}

// atSQL is the time that orderSQL sorts by, to be selected as "at".
func atSQL(t *outbox.Table, alias string) string {
	if comesByTime(t) {
		return alias + "." + t.Column(outbox.OccurredAt)
	}
	return "NULL"
}

// listedSQL is orderSQL of what was selected as x, with id and at.
func listedSQL(t *outbox.Table) string {
	if comesByTime(t) {
		return "x.at, x.id"
	}
	return "x.id"
}

// Counts reports whether ids of the type tell which row came first.
func Counts(idType string) bool {
	integers := []string{"smallint", "integer", "bigint"}
	return strings.HasPrefix(idType, "numeric") || slices.Contains(integers, idType)
}
