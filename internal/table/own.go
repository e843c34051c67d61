package table

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/check"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/outbox"
)

// ownTables are walpost's own tables with their schemas, quoted, as a connection has found them.
type ownTables struct {
	deadLetters, archive, replays, sent, known string
	// strangers are tables with their names that count as missing, by what they are.
	strangers map[string][]string
	schema    string
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
	own.strangers, own.schema = map[string][]string{}, where.Schema
	for i, p := range places {
		*p.sql = found[i].SQL
		if is := found[i].Stranger; is != "" {
			own.strangers[is] = append(own.strangers[is], p.name)
		}
	}
	own.journal.Known, own.appendOnly = own.known, where.Named(AppendOnly)
	own.system, err = pg.SystemIdentifier(ctx, conn)
	return own, err
}

// StrangerFindings warn of tables with the names of walpost's own that count as missing.
func (db *DB) StrangerFindings() (f check.Findings) {
	for _, is := range slices.Sorted(maps.Keys(db.own.strangers)) {
		f.Warning("table-stranger",
			"if walpost made it, name its owner in postgres.owner, or give it to the outboxes' owner; "+
				"else drop it",
			"what is called %s in schema %s %s: it counts as missing",
			strings.Join(db.own.strangers[is], ", "), db.own.schema, is)
	}
	return f
}

// strangersOf says what the tables are that count as missing, behind what a missing one means.
func (own *ownTables) strangersOf(names ...string) (why string) {
	for _, is := range slices.Sorted(maps.Keys(own.strangers)) {
		if slices.ContainsFunc(own.strangers[is], func(n string) bool { return slices.Contains(names, n) }) {
			why += fmt.Sprintf("; what is called so in schema %s %s", own.schema, is)
		}
	}
	return why
}
