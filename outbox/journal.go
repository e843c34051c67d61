package outbox

// Journal names walpost's own tables that the marks of an outbox stand in where it has [MarkJournal], quoted
// and with their schemas. It is set as [Table.IDType] is.
type Journal struct {
	// Entries is outbox_journal: the ids that are delivered, dead or skipped, many in a row.
	Entries string
	// Deferred is outbox_deferred: the pending rows that are parked, held, or due later.
	Deferred string
	// Known is outbox_known: up to which id every row is in one of the others.
	Known string
}

// journalColumns are the columns that a row has in the journal and not in its table. No table has columns of
// such names.
var journalColumns = [NumFields]string{
	ProcessedAt: "journal.processed_at", Attempts: "deferred.attempts", LastError: "deferred.last_error",
	AvailableAt: "deferred.available_at",
}

// Journaled is the layout for [MarkJournal]: marks and failures stand in the journal. Columns of the table
// for them, and a status, are left alone. The table may have a column for available_at.
func (l Layout) Journaled() Layout {
	l.Unjournaled = l.Columns[ProcessedAt]
	for f, column := range journalColumns {
		if column != "" && (Field(f) != AvailableAt || !l.Has(AvailableAt)) {
			l.Columns[f] = column
		}
	}
	l.Columns[Status], l.States = "", [NumStates]string{}
	return l
}

// InJournal reports whether the journal has a field's column, and the table has not.
func (l *Layout) InJournal(f Field) bool { return l.Has(f) && l.Columns[f] == journalColumns[f] }
