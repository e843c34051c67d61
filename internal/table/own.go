package table

import (
	"context"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// ownTables are walpost's own tables with their schemas, quoted, as a connection has found them.
type ownTables struct {
	deadLetters, archive, replays, sent, known string
	// system is the server's identifier, "" where the role may not know it.
	system string

	journal outbox.Journal
	// appendOnly is the function of triggers, in the journal's schema.
	appendOnly string
}

// FindJournal is the journal of an outbox, for statements on a connection that no [DB] has opened.
func FindJournal(ctx context.Context, conn *pgx.Conn, schema string) (outbox.Journal, error) {
	own, err := findOwn(ctx, conn, schema)
	return own.journal, err
}

func findOwn(ctx context.Context, conn *pgx.Conn, schema string) (own ownTables, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	found, err := pg.FindTables(ctx, conn, schema, DeadLetters, Archive, Replays,
		JournalEntries, JournalDeferred, KnownTable, SentTable)
	if err != nil {
		return own, err
	}
	own = ownTables{
		deadLetters: found[0], archive: found[1], replays: found[2], sent: found[6], known: found[5],
		journal: outbox.Journal{Entries: found[3], Deferred: found[4], Known: found[5]},
		appendOnly: strings.TrimSuffix(found[3], outbox.QuoteIdent(JournalEntries)) +
			outbox.QuoteIdent(AppendOnly),
	}
	own.system, err = pg.SystemIdentifier(ctx, conn)
	return own, err
}
