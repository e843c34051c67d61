package table

import (
	"fmt"

	"github.com/walpost/walpost/outbox"
)

// PendingSQL is the condition under which a row still waits to be delivered, by this relay.
func PendingSQL(t *outbox.Table, alias string) string {
	pending := "true"
	if t.Layout.Has(outbox.ProcessedAt) {
		pending = alias + "." + t.Column(outbox.ProcessedAt) + " IS NULL"
	}
	return pending + ShardSQL(t, alias)
}

// ShardSQL narrows a condition to the rows that are this relay's.
func ShardSQL(t *outbox.Table, alias string) string {
	if s := t.ShardSQL(alias); s != "" {
		return " AND " + s
	}
	return ""
}

// UnmarkedSQL is [PendingSQL] in words that the index of recorded rows answers to, and no other partial
// index does. A query with it finds a row by its id, or by its aggregate.
func UnmarkedSQL(t *outbox.Table, alias string) string {
	if t.Layout.Has(outbox.ProcessedAt) {
		return "num_nulls(" + alias + "." + t.Column(outbox.ProcessedAt) + ") = 1"
	}
	return "true"
}

// FreeSQL is the condition under which a row is to be changed: it is one of those that the CTE "free" has
// locked. The id alone does not identify it: where ids are not unique, as in a partitioned table, another
// row may have the same one. The id is for the index, and IS TRUE keeps IN from becoming a join.
func FreeSQL(t *outbox.Table) string {
	return fmt.Sprintf("t.%s = ANY (ARRAY(SELECT f.id FROM free f)) "+
		"AND ((t.tableoid, t.ctid) IN (SELECT f.place, f.at FROM free f)) IS TRUE", t.Column(outbox.ID))
}
