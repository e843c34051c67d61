package table

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// ownTables are walpost's own tables with their schemas, quoted, as a connection has found them.
type ownTables struct {
	where pg.Own

	deadLetters, archive, replays, sent, known string
	// system is the server's identifier, "" where the role may not know it.
	system string

	journal outbox.Journal
	// appendOnly is the function of triggers, in the journal's schema.
	appendOnly string
}

// FindJournal is the journal of an outbox, for statements on a connection that no [DB] has opened.
func FindJournal(ctx context.Context, conn *pgx.Conn, where pg.Own) (outbox.Journal, error) {
	own, err := findOwn(ctx, conn, where)
	return own.journal, err
}

func findOwn(ctx context.Context, conn *pgx.Conn, where pg.Own) (own ownTables, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	places := []struct {
		name string
		sql  *string
	}{
		{DeadLetters, &own.deadLetters},
		{Archive, &own.archive},
		{Replays, &own.replays},
		{SentTable, &own.sent},
		{KnownTable, &own.known},
		{JournalEntries, &own.journal.Entries},
		{JournalDeferred, &own.journal.Deferred},
	}
	names := make([]string, len(places))
	for i, p := range places {
		names[i] = p.name
	}
	found, err := where.Find(ctx, conn, names...)
	if err != nil {
		return own, err
	}
	for i, p := range places {
		*p.sql = found[i]
	}
	own.where = where
	own.journal.Known, own.appendOnly = own.known, where.Named(AppendOnly)
	own.system, err = pg.SystemIdentifier(ctx, conn)
	return own, err
}
