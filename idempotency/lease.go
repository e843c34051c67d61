package idempotency

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/walpost/walpost/internal/pg"
)

// leaseTime is how long a request belongs to a process that says nothing more.
const leaseTime = 30 * time.Second

// leases renews those of the running handlers, with one statement for all of them. Its goroutine runs while
// there is a handler, and opens its own connection once one of them takes long: handlers may hold all
// connections of the pool.
type leases struct {
	pool  *pgxpool.Pool
	store *store
	log   *slog.Logger

	// mu guards what follows.
	mu   sync.Mutex
	held map[string]*claim // by token
	stop context.CancelFunc
}

func newLeases(pool *pgxpool.Pool, s *store, log *slog.Logger) *leases {
	return &leases{pool: pool, store: s, log: log, held: map[string]*claim{}}
}

func (l *leases) add(c *claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.held[c.token] = c; len(l.held) == 1 {
		var ctx context.Context
		ctx, l.stop = context.WithCancel(context.Background())
		go l.run(ctx)
	}
}

func (l *leases) remove(c *claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if delete(l.held, c.token); len(l.held) == 0 {
		l.stop()
	}
}

func (l *leases) list() (all []*claim) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.held {
		all = append(all, c)
	}
	return all
}

// run renews three times in a lease. It alone uses the connection.
func (l *leases) run(ctx context.Context) {
	every := time.NewTicker(l.store.lease / 3)
	defer every.Stop()
	var conn *pgx.Conn
	defer func() { disconnect(conn) }()
	for {
		select {
		case <-ctx.Done():
			return
		case <-every.C:
		}
		var err error
		if conn, err = l.renew(ctx, conn); err != nil && ctx.Err() == nil {
			l.log.WarnContext(ctx, "renew idempotency leases", "error", err)
		}
	}
}

// renew returns the connection for the next time, or nil after an error.
func (l *leases) renew(ctx context.Context, conn *pgx.Conn) (*pgx.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, l.store.lease/3)
	defer cancel()
	if conn == nil {
		var err error
		if conn, err = pg.ConnectBeside(ctx, l.pool); err != nil {
			return nil, err
		}
	}
	own := *l.store
	own.db = conn
	if err := own.renew(ctx, l.list()); err != nil {
		disconnect(conn)
		return nil, err
	}
	return conn, nil
}

func disconnect(conn *pgx.Conn) {
	if conn == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_ = conn.Close(ctx) // the server notices by itself where it fails
}

// renewSQL skips a row that is locked: its handler is in a transaction, and needs no lease.
const renewSQL = `UPDATE {table} k SET lease_until = now() + $5::interval
	FROM (
		SELECT f.tenant_id, f.scope, f.key FROM {table} f
		JOIN unnest($1::bigint[], $2::text[], $3::text[], $4::text[]) l(tenant_id, scope, key, token)
			ON f.tenant_id = l.tenant_id AND f.scope = l.scope AND f.key = l.key AND f.token = l.token::uuid
		WHERE f.state = 'pending' FOR UPDATE OF f SKIP LOCKED
	) mine
	WHERE k.tenant_id = mine.tenant_id AND k.scope = mine.scope AND k.key = mine.key`

func (s *store) renew(ctx context.Context, claims []*claim) error {
	var tenants []int64
	var scopes, keys, tokens []string
	for _, c := range claims {
		tenants = append(tenants, c.tenant)
		scopes = append(scopes, c.scope)
		keys = append(keys, c.key)
		tokens = append(tokens, c.token)
	}
	return s.do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		_, err := tx.Exec(ctx, s.sql(renewSQL), tenants, scopes, keys, tokens, s.lease)
		return err
	})
}
