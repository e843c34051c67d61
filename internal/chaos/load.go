package main

import (
	"context"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/internal/testenv"
)

const aggregates = 100

// schemaSQL: a number is given under its aggregate's lock, and a rollback takes it
// back. So the numbers of an aggregate are 1 to n, in the order of the commits.
const schemaSQL = `
	CREATE TABLE numbers (aggregate bigint PRIMARY KEY, n bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50);
	INSERT INTO numbers SELECT generate_series(0, 99);
	CREATE TABLE reminders (n bigint NOT NULL);
	CREATE TABLE history (LIKE outbox_messages)`

// insertSQL writes events of an aggregate; delayed ones have one of their own each,
// because they take their place when they are due.
const (
	insertSQL = `WITH counter AS (
			UPDATE numbers SET n = n + $2::int WHERE aggregate = $1::bigint RETURNING n - $2::int AS n)
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT $1::bigint % 3, 'account', $1::bigint, 'account.moved', jsonb_build_object(
			'aggregate', $1::bigint, 'n', counter.n + g, 'pad', repeat('x', $3::int))
		FROM counter, generate_series(1, $2::int) g`
	delayedSQL = `WITH counted AS (INSERT INTO reminders VALUES ($1::int))
		INSERT INTO outbox_messages
			(tenant_id, aggregate_type, aggregate_id, event_type, payload, available_at)
		SELECT 7, 'reminder', (random() * 1e15)::bigint, 'account.reminded',
			jsonb_build_object('n', g, 'r', random()),
			clock_timestamp() + (1 + 5 * random()) * interval '1 second'
		FROM generate_series(1, $1::int) g`
	// A space is not for a subject: the row fails, and its aggregate's later rows wait
	// until it is a dead letter.
	poisonSQL = `WITH counter AS (UPDATE numbers SET n = n + 1 WHERE aggregate = $1::bigint RETURNING n)
		INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
		SELECT $1::bigint % 3, 'account', $1::bigint, 'account cursed',
			jsonb_build_object('aggregate', $1::bigint, 'n', n) FROM counter`
)

// mostAhead is how many due rows writers leave the relays, about, before they wait.
const mostAhead = 5000

var aheadSQL = strings.Replace(testenv.AheadSQL, outboxTable.Name, rowsTable.Name, 1)

// load is writers, some with synchronous_commit off. A lost connection does not end
// them: what became of a transaction whose commit was not answered, the table tells.
type load struct {
	w       *world
	rows    atomic.Int64
	least   int64
	ending  atomic.Bool // no more than least
	writing sync.WaitGroup
}

func (w *world) startLoad(ctx context.Context, seed uint64, least int) *load {
	l := &load{w: w, least: int64(least)}
	for i := range 4 {
		rng := rand.New(rand.NewPCG(seed, uint64(100+i)))
		l.writing.Go(func() { l.write(ctx, rng, i%2 == 0) })
	}
	return l
}

// finish returns when the least number of rows is written.
func (l *load) finish() {
	l.ending.Store(true)
	l.writing.Wait()
}

func (l *load) done() bool { return l.ending.Load() && l.rows.Load() >= l.least }

func (l *load) write(ctx context.Context, rng *rand.Rand, async bool) {
	for ctx.Err() == nil && !l.done() {
		l.session(ctx, rng, async)
		sleep.For(ctx, 50*time.Millisecond)
	}
}

func (l *load) session(ctx context.Context, rng *rand.Rand, async bool) {
	conn, err := l.w.connect(ctx)
	if err != nil {
		return
	}
	defer conn.Close(context.Background())
	if async {
		if _, err := conn.Exec(ctx, `SET synchronous_commit = off`); err != nil {
			return
		}
	}
	for ctx.Err() == nil && !l.done() {
		enough := false
		if !l.ending.Load() && conn.QueryRow(ctx, aheadSQL, mostAhead).Scan(&enough) != nil {
			return
		}
		if !enough {
			n, err := l.transaction(ctx, conn, rng)
			if err != nil {
				return
			}
			l.rows.Add(int64(n))
		}
		// Faster than the faults come, and not so fast that nothing else gets a turn.
		sleep.For(ctx, time.Duration(40+rng.IntN(160))*time.Millisecond)
	}
}

// transaction writes to some aggregates, in one order so that no two writers wait for
// each other. A tenth is rolled back, and so are some savepoints.
func (l *load) transaction(ctx context.Context, conn *pgx.Conn, rng *rand.Rand) (rows int, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var of []int64
	for range 1 + rng.IntN(4) {
		of = append(of, rng.Int64N(aggregates))
	}
	slices.Sort(of)
	tx, err := conn.Begin(ctx)
	if err != nil {
		return 0, err
	}
	defer tx.Rollback(context.WithoutCancel(ctx))
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock_shared(1)`); err != nil { // see truncate
		return 0, err
	}
	for _, a := range slices.Compact(of) {
		n := 1 + rng.IntN(12)
		if rng.IntN(50) == 0 {
			n = 1 + rng.IntN(300)
		}
		if rng.IntN(10) == 0 {
			err = pgx.BeginFunc(ctx, tx, func(sub pgx.Tx) error {
				if _, err := sub.Exec(ctx, insertSQL, a, n, 10); err != nil {
					return err
				}
				return sub.Rollback(ctx)
			})
			if err != nil && err != pgx.ErrTxClosed {
				return 0, err
			}
		}
		if _, err := tx.Exec(ctx, insertSQL, a, n, rng.IntN(300)); err != nil {
			return 0, err
		}
		rows += n
		if rng.IntN(300) == 0 {
			if _, err := tx.Exec(ctx, poisonSQL, a); err != nil {
				return 0, err
			}
		}
	}
	if rng.IntN(40) == 0 {
		if _, err := tx.Exec(ctx, delayedSQL, 1+rng.IntN(10)); err != nil {
			return 0, err
		}
	}
	if rng.IntN(10) == 0 {
		return 0, tx.Rollback(ctx)
	}
	return rows, tx.Commit(ctx)
}
