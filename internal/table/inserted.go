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
	processed, lastError := t.Column(outbox.ProcessedAt), t.Column(outbox.LastError)
	state := fmt.Sprintf("concat(t.%s) = w.failure AND (t.%s LIKE '%s%%') IS NOT TRUE",
		processed, lastError, Skipped)
	note := pg.QuoteLiteral(Skipped + "inserted as processed")
	change := fmt.Sprintf(`UPDATE %s t SET %[2]s = concat(%[3]s, ': ' || t.%[2]s)
		WHERE %[4]s AND t.%[5]s IS NOT NULL RETURNING t.%[6]s AS id`,
		t.SQL(), lastError, note, FreeSQL(t), processed, t.Column(outbox.ID))
	return settling{want: wantAll, same: state + " AND " + sameSQL(t), change: change}.sql(t)
}
