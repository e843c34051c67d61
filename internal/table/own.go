package table

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// ownTables are walpost's own tables with their schemas, quoted, as a connection has found them.
type ownTables struct {
	deadLetters, archive, replays string

	journal outbox.Journal
}

func findOwn(ctx context.Context, conn *pgx.Conn, schema string) (own ownTables, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	found, err := pg.FindTables(ctx, conn, schema, DeadLetters, Archive, Replays,
		JournalEntries, JournalDeferred, JournalProgress)
	if err == nil {
		own = ownTables{found[0], found[1], found[2], outbox.Journal{
			Entries: found[3], Deferred: found[4], Progress: found[5],
		}}
	}
	return own, err
}
