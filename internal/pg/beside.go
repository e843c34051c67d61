package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ConnectBeside opens a connection as an application's pool does, but not in the pool: it is there when the
// pool has none left. Names on it resolve as on the pool's connections: it is the application's.
func ConnectBeside(ctx context.Context, pool *pgxpool.Pool) (*pgx.Conn, error) {
	cfg := pool.Config()
	if cfg.BeforeConnect != nil {
		if err := cfg.BeforeConnect(ctx, cfg.ConnConfig); err != nil {
			return nil, fmt.Errorf("connect beside the pool: %w", err)
		}
	}
	conn, err := pgx.ConnectConfig(ctx, cfg.ConnConfig)
	if err != nil {
		return nil, fmt.Errorf("connect beside the pool: %w", err)
	}
	if cfg.AfterConnect != nil {
		if err := cfg.AfterConnect(ctx, conn); err != nil {
			err = errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
			return nil, fmt.Errorf("connect beside the pool: %w", err)
		}
	}
	return conn, nil
}
