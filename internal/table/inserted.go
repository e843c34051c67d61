package table

import (
	"context"
	"fmt"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// NoteInserted notes in rows that they were inserted as processed: they are not to be delivered, and not
// lost. A row's Failure is the mark that it was inserted with: one that carries another mark was
// delivered since.
func (db *DB) NoteInserted(ctx context.Context, t *outbox.Table, rows []Row) ([]Verdict, error) {
	return db.settle(ctx, t, rows, noteInsertedSQL(t), (*args).all)
}

func noteInsertedSQL(t *outbox.Table) string {
	processed := t.Column(outbox.ProcessedAt)
	state, set := fmt.Sprintf("concat(t.%s) = w.failure", processed), processed+" = NULL"
	if t.Layout.Has(outbox.LastError) {
		lastError := t.Column(outbox.LastError)
		state += fmt.Sprintf(" AND (t.%s LIKE '%s%%') IS NOT TRUE", lastError, Skipped)
		set = fmt.Sprintf("%s = concat(%s, ': ' || t.%[1]s)", lastError,
			pg.QuoteLiteral(Skipped+"inserted as processed"))
	}
	change := fmt.Sprintf(`UPDATE %s t SET %s WHERE %s AND t.%s IS NOT NULL RETURNING t.%s AS id`,
		t.SQL(), set, FreeSQL(t), processed, t.Column(outbox.ID))
	return settling{want: wantAll, same: state + " AND " + sameSQL(t), change: change}.sql(t)
}
