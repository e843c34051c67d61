package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/walpost/walpost/internal/hint"
)

// DirectHint is the advice where a pooler is in the way.
const DirectHint = "give postgres.url the host and port of PostgreSQL itself, not a pooler's: " +
	"what a relay locks and sets must stay with its connection"

// ErrPooler means that connections go through a pooler that hands one server session to several clients.
var ErrPooler = errors.New("a connection has no server session of its own")

// CheckDirect reports [ErrPooler] where connections go through a pooler in transaction mode: an advisory lock
// would be nobody's. It sets nothing, because the session that it would change may be another client's next.
func CheckDirect(ctx context.Context, c Config) error {
	cfg, err := c.parse()
	if err != nil {
		return err
	}
	conn, err := pgconn.ConnectConfig(ctx, &cfg.Config)
	if err != nil {
		return fmt.Errorf("connect to PostgreSQL: %w", c.explain(plain(err)))
	}
	defer func() { _ = conn.Close(ctx) }()
	return prove(ctx, &cfg.Config, conn)
}

// prove does not guess: two open connections are two server processes, and each stays with its own.
func prove(ctx context.Context, bare *pgconn.Config, first *pgconn.PgConn) error {
	second, err := pgconn.ConnectConfig(ctx, bare)
	if err != nil {
		return plain(err)
	}
	defer func() { _ = second.Close(ctx) }()
	var pids [3]string
	for i, conn := range []*pgconn.PgConn{first, second, first} {
		row, err := queryRow(ctx, conn, `SELECT pg_catalog.pg_backend_pid()`)
		if err != nil {
			return fmt.Errorf("check for a pooler: %w", err)
		}
		pids[i] = row[0]
	}
	if pids[0] == pids[1] || pids[0] != pids[2] {
		err := hint.Errorf(DirectHint, "postgres.url leads to a pooler in transaction mode: %w", ErrPooler)
		return hint.Coded("pg-pooler", err)
	}
	return nil
}
