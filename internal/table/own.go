package table

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/pg"
)

// ownTables are walpost's own tables with their schemas, quoted, as a connection has found them.
type ownTables struct{ deadLetters, archive, replays string }

func findOwn(ctx context.Context, conn *pgx.Conn, schema string) (own ownTables, err error) {
	ctx, cancel := context.WithTimeout(ctx, pg.StatementTimeout)
	defer cancel()
	found, err := pg.FindTables(ctx, conn, schema, DeadLetters, Archive, Replays)
	if err == nil {
		own = ownTables{found[0], found[1], found[2]}
	}
	return own, err
}
