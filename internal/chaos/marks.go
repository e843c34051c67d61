package main

import (
	"strings"

	"github.com/walpost/walpost/internal/table"
	"github.com/walpost/walpost/outbox"
)

// marks are what a run's relays may do with delivered rows.
var marks = []string{string(outbox.MarkUpdate), string(outbox.MarkJournal)}

// outboxTable is the outbox with the canonical columns, as the rig reads it.
var outboxTable = &outbox.Table{
	Schema: "public", Name: "outbox_messages", Layout: outbox.Canonical(), Mark: outbox.MarkUpdate,
}

// rowsTable is the view outbox_rows, in which rows look the same with every mark: those that are neither
// deleted nor dead, with their marks and failures. version changes with the row.
var rowsTable = func() *outbox.Table {
	t := *outboxTable
	t.Name = "outbox_rows"
	return &t
}()

const updateRowsSQL = `CREATE VIEW outbox_rows AS SELECT t.*, t.xmin::text AS version FROM outbox_messages t`

// journalRowsSQL reads the journal by itself.
const journalRowsSQL = `CREATE VIEW outbox_rows AS
	SELECT t.id, t.tenant_id, t.aggregate_type, t.aggregate_id, t.event_type, t.event_version, t.payload,
		t.occurred_at, t.trace_id, t.xmin::text AS version, j.processed_at, d.last_error,
		coalesce(d.attempts, 0) AS attempts, coalesce(d.available_at, t.available_at) AS available_at
	FROM outbox_messages t
	LEFT JOIN outbox_deferred d ON d.outbox = 'public.outbox_messages' AND d.id = t.id
	LEFT JOIN (
		SELECT g.id, max(j.processed_at) AS processed_at, bool_or(j.kind = 'dead') AS dead
		FROM outbox_journal j, unnest(j.ids) r, generate_series(lower(r), upper(r) - 1) AS g(id)
		WHERE j.outbox = 'public.outbox_messages' GROUP BY 1
	) j ON j.id = t.id
	WHERE j.dead IS NOT TRUE`

func (p *plan) journals() bool { return p.mark == string(outbox.MarkJournal) }

// fitSQL makes the outbox one for the mark, and creates the view.
func (p *plan) fitSQL() string {
	if !p.journals() {
		return updateRowsSQL
	}
	return strings.Join(append(table.AppendOnlySQL(outboxTable, table.AppendOnly), journalRowsSQL), ";")
}

// lockSQL locks the rows of a view that can be.
func (p *plan) lockSQL() string {
	if p.journals() {
		return ""
	}
	return " FOR UPDATE"
}

// againSQL makes a delivered row pending again, as held: that with id $1 and hash $2.
func (p *plan) againSQL() string {
	same := `t.id = $1::bigint AND ` + outboxTable.HashSQL("t") + ` = $2`
	if !p.journals() {
		return `UPDATE outbox_messages t
			SET processed_at = NULL, last_error = 'held: delivered again' WHERE ` + same
	}
	return `WITH taken AS (
			UPDATE outbox_journal SET ids = ids - int8multirange(int8range($1::bigint, $1::bigint, '[]'))
			WHERE ids @> $1::bigint
		)
		INSERT INTO outbox_deferred (outbox, id, last_error, available_at, aggregate_hash)
		SELECT 'public.outbox_messages', t.id, 'held: delivered again', now(), ` +
		outboxTable.AggregateHashSQL("t") + ` FROM outbox_messages t WHERE ` + same + `
		ON CONFLICT DO NOTHING`
}
