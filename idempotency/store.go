package idempotency

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/keys"
	"github.com/walpost/walpost/outbox"
)

// store is the table. Its statements are short: each runs in its own transaction, at READ COMMITTED
// whatever the pool's default. At REPEATABLE READ two requests with one key would be a serialization failure.
//
// Names resolve on the application's search_path. Every function and operator in the statements takes exactly
// the types that it is declared with in pg_catalog, so that none in another schema is a better match.
type store struct {
	db    beginner
	table string // quoted
	lease time.Duration
	ttl   time.Duration
}

// beginner is a pool or a connection.
type beginner interface {
	BeginTx(ctx context.Context, opts pgx.TxOptions) (pgx.Tx, error)
}

// storeTimeout bounds the wait for a connection and for the statement.
const storeTimeout = 10 * time.Second

// quoteTable is the table of that name, by default the one that `walpost migrate` creates.
func quoteTable(name string) (string, error) {
	if name == "" {
		name = keys.Table
	}
	schema, name, err := outbox.ParseTable(name)
	return outbox.QuoteIdent(schema) + "." + outbox.QuoteIdent(name), err
}

// do runs short statements. They go on when the client has gone: a claim whose reply was lost would keep
// others waiting until its lease ends.
func (s *store) do(ctx context.Context, f func(ctx context.Context, tx pgx.Tx) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), storeTimeout)
	defer cancel()
	opts := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}
	tx, err := s.db.BeginTx(ctx, opts)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx) //nolint:errcheck // after the commit there is nothing to roll back
	if err := f(ctx, tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

func (s *store) sql(text string) string { return strings.ReplaceAll(text, "{table}", s.table) }

// claim is the right of one execution to the row of a key.
type claim struct {
	tenant int64
	scope  string
	key    string
	hash   []byte
	token  string // a UUID, new for each execution
}

func newToken() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // it never fails
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}

// row is what the table has for a key.
type row struct {
	sameHash bool
	state    string
	token    string
	free     bool // no lease, and expired or waiting for the same request
	stored
}

// The key's row is inserted, or taken over where no execution holds it: it has expired, or the same
// request was begun and its lease is over. No statement waits for a handler's transaction, because it would
// hold a connection meanwhile. So a locked row is skipped, and ON CONFLICT, which waits for an updated row,
// is only reached where there is no row.
const (
	insertSQL = `INSERT INTO {table} AS k
			(tenant_id, scope, key, request_hash, token, lease_until, expires_at)
		SELECT $1::bigint, $2::text, $3::text, $4::bytea, $5::text::uuid,
			now() + $6::interval, now() + $7::interval
		WHERE NOT EXISTS (
			SELECT FROM {table} o WHERE o.tenant_id = $1::bigint AND o.scope = $2::text AND o.key = $3::text)
		ON CONFLICT DO NOTHING`

	readSQL = `SELECT k.request_hash = $4::bytea, k.state, k.token::text,
			(k.lease_until IS NULL OR k.lease_until <= now())
				AND (k.expires_at <= now() OR k.state = 'pending' AND k.request_hash = $4::bytea),
			coalesce(k.status_code, 0), coalesce(k.response_headers::text, '{}'), k.response_body
		FROM {table} k WHERE k.tenant_id = $1::bigint AND k.scope = $2::text AND k.key = $3::text`

	takeSQL = `UPDATE {table} k SET request_hash = $4::bytea, token = $5::text::uuid, state = 'pending',
			response = NULL, status_code = NULL, response_body = NULL, response_headers = NULL,
			created_at = now(), completed_at = NULL,
			lease_until = now() + $6::interval,
			expires_at = now() + $7::interval
		WHERE k.tenant_id = $1::bigint AND k.scope = $2::text AND k.key = $3::text AND EXISTS (
			SELECT FROM {table} f
			WHERE f.tenant_id = $1::bigint AND f.scope = $2::text AND f.key = $3::text
				AND (f.lease_until IS NULL OR f.lease_until <= now())
				AND (f.expires_at <= now() OR f.state = 'pending' AND f.request_hash = $4::bytea)
			FOR UPDATE SKIP LOCKED)`
)

// acquire returns true where the claim owns the key's row now, and else what the row has. The row is nil
// where it vanished between two statements.
func (s *store) acquire(ctx context.Context, c *claim) (owned bool, found *row, err error) {
	err = s.do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		args := []any{c.tenant, c.scope, c.key, c.hash, c.token, s.lease, s.ttl}
		tag, err := tx.Exec(ctx, s.sql(insertSQL), args...)
		if owned = tag.RowsAffected() == 1; err != nil || owned {
			return err
		}
		if found, err = s.read(ctx, tx, c); err != nil || found == nil || !found.free {
			return err
		}
		tag, err = tx.Exec(ctx, s.sql(takeSQL), args...)
		owned = tag.RowsAffected() == 1
		if !owned { // it is locked, or another request was first
			found = &row{sameHash: true, state: "pending"}
		}
		return err
	})
	return owned && err == nil, found, err
}

func (s *store) read(ctx context.Context, tx pgx.Tx, c *claim) (*row, error) {
	var r row
	err := tx.QueryRow(ctx, s.sql(readSQL), c.tenant, c.scope, c.key, c.hash).
		Scan(&r.sameHash, &r.state, &r.token, &r.free, &r.status, &r.header, &r.body)
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, nil
	}
	return &r, err
}

// lock takes the row of an execution for its transaction, and returns the transaction's id.
func (s *store) lock(ctx context.Context, tx pgx.Tx, c *claim) (xid string, err error) {
	err = tx.QueryRow(ctx, s.sql(lockSQL), c.tenant, c.scope, c.key, c.token).Scan(&xid)
	if errors.Is(err, pgx.ErrNoRows) {
		err = errLost
	}
	return xid, err
}

// errLost means that another execution has the row, or that it was purged.
var errLost = errors.New("lost the key to another request")

// Only the execution whose token the row has may change it, and only once.
const (
	lockSQL = `SELECT pg_current_xact_id()::text FROM {table} k
		WHERE k.tenant_id = $1::bigint AND k.scope = $2::text AND k.key = $3::text
			AND k.token = $4::text::uuid AND k.state = 'pending'
		FOR UPDATE`

	finishSQL = `UPDATE {table} k SET
			state = $5::text, status_code = $6::smallint, response = $7::text::jsonb,
			response_headers = $8::text::jsonb, response_body = $9::bytea,
			completed_at = clock_timestamp(), lease_until = NULL
		WHERE k.tenant_id = $1::bigint AND k.scope = $2::text AND k.key = $3::text
			AND k.token = $4::text::uuid AND k.state = 'pending'
			AND ($10::text = '' OR pg_current_xact_id()::text = $10::text)`

	releaseSQL = `DELETE FROM {table} k
		WHERE k.tenant_id = $1::bigint AND k.scope = $2::text AND k.key = $3::text
			AND k.token = $4::text::uuid AND k.state = 'pending'`
)

// finish stores the response. It reports false where the row is another execution's, or where tx is not the
// transaction xid any more.
func (s *store) finish(ctx context.Context, tx pgx.Tx, c *claim, r *response, xid string) (bool, error) {
	state := "completed"
	if r.status >= 400 {
		state = "failed"
	}
	body := r.body
	if body == nil && !r.large {
		body = []byte{}
	}
	tag, err := tx.Exec(ctx, s.sql(finishSQL), c.tenant, c.scope, c.key, c.token,
		state, r.status, castable(tx, body), storedHeader(r.sent), body, xid)
	return tag.RowsAffected() == 1, err
}

// save is [store.finish] in its own transaction.
func (s *store) save(ctx context.Context, c *claim, r *response) (owned bool, err error) {
	err = s.do(ctx, func(ctx context.Context, tx pgx.Tx) (err error) {
		owned, err = s.finish(ctx, tx, c, r, "")
		return err
	})
	return owned, err
}

// release lets the next request with the key be executed. It waits for a transaction of this execution whose
// outcome is not known yet, and so it tells what became of that: true means that it was rolled back. Else the
// row says what happened; nil where the key has no row.
func (s *store) release(ctx context.Context, c *claim) (released bool, found *row, err error) {
	err = s.do(ctx, func(ctx context.Context, tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, s.sql(releaseSQL), c.tenant, c.scope, c.key, c.token)
		if released = tag.RowsAffected() == 1; err != nil || released {
			return err
		}
		found, err = s.read(ctx, tx, c)
		return err
	})
	return released && err == nil, found, err
}

// castable is the body for the column response, or nil where jsonb cannot hold it: a failed cast would abort
// the handler's transaction.
func castable(tx pgx.Tx, body []byte) any {
	d, err := parseJSON(body)
	if err != nil || !d.castable {
		return nil
	}
	encoding := tx.Conn().PgConn().ParameterStatus("server_encoding")
	beyondASCII := func(c rune) bool { return c > '~' || c == '\\' }
	if encoding != "UTF8" && bytes.ContainsFunc(body, beyondASCII) {
		return nil
	}
	return string(body)
}
