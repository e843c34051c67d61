package e2e

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	writers    = 8
	aggregates = 200
)

// load is eight writers who write as fast as they can what they were asked for.
// A lost connection does not end them: what became of a transaction whose commit
// was not answered, the table tells in the end.
type load struct {
	*rig
	asked atomic.Int64 // rows
	last  atomic.Bool  // nothing more will be asked for

	rows       atomic.Int64 // in commits that were answered
	commits    atomic.Int64
	rolledBack atomic.Int64
	cutOff     atomic.Int64 // transactions that failed, before or at the commit
}

// numbers hold each aggregate's counter: a number is given under the aggregate's
// lock, and a rollback takes it back.
const numbers = `CREATE TABLE numbers (aggregate bigint PRIMARY KEY, n bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50)`

func (r *rig) newLoad() *load {
	r.t.Helper()
	r.exec(numbers + fmt.Sprintf(`; INSERT INTO numbers SELECT generate_series(0, %d)`, aggregates-1))
	return &load{rig: r}
}

// ask lets the writers write so many rows more, or a little more than that: they
// look only before a transaction.
func (l *load) ask(rows int) {
	for {
		before := l.asked.Load()
		if l.asked.CompareAndSwap(before, max(before, l.rows.Load())+int64(rows)) {
			return
		}
	}
}

// complete lets them write what is missing to a total, and be done.
func (l *load) complete(total int) {
	l.asked.Store(int64(total))
	l.last.Store(true)
}

// run returns when all that was asked for is written.
func (l *load) run(ctx context.Context) {
	var all sync.WaitGroup
	for i := range writers {
		w := &writer{load: l, plans: planner{l.random(uint64(i))}, async: i%3 == 0}
		all.Go(func() { w.run(ctx) })
	}
	all.Wait()
	l.t.Logf("load: %d rows in %d commits, %d rollbacks, %d transactions cut off",
		l.rows.Load(), l.commits.Load(), l.rolledBack.Load(), l.cutOff.Load())
	l.checkNumbers()
}

// checkNumbers sees that the load was what the audit takes it for: where an
// aggregate's numbers have no gap, they were given in the order of the commits.
func (l *load) checkNumbers() {
	var broken int
	l.query(`SELECT count(*) FROM (SELECT FROM outbox_messages GROUP BY aggregate_id
		HAVING count(*) <> max((payload ->> 'n')::bigint) OR count(*) <> count(DISTINCT payload ->> 'n')) x`, &broken)
	if broken > 0 {
		l.t.Errorf("%d aggregates do not have the numbers 1 to n", broken)
	}
}

// writer is one session after the other.
type writer struct {
	*load
	plans planner
	async bool
	conn  *pgx.Conn
}

func (w *writer) run(ctx context.Context) {
	defer w.disconnect()
	for ctx.Err() == nil {
		if w.rows.Load() >= w.asked.Load() {
			if w.last.Load() {
				return
			}
			sleep(ctx, 2*time.Millisecond)
			continue
		}
		if !w.write(ctx, w.plans.next()) {
			w.disconnect()
			sleep(ctx, 20*time.Millisecond)
		}
	}
}

func (w *writer) write(ctx context.Context, p plan) bool {
	if err := w.transaction(ctx, p); err != nil {
		w.cutOff.Add(1)
		return false
	}
	if p.rollback {
		w.rolledBack.Add(1)
		return true
	}
	w.commits.Add(1)
	w.rows.Add(int64(p.rows()))
	return true
}

func (w *writer) disconnect() {
	if w.conn != nil {
		_ = w.conn.Close(context.Background())
		w.conn = nil
	}
}

func (w *writer) transaction(ctx context.Context, p plan) error {
	if err := w.connected(ctx); err != nil {
		return err
	}
	tx, err := w.conn.Begin(ctx)
	if err != nil {
		return err
	}
	// In one order, so that no two writers wait for each other.
	for _, a := range p.locks() {
		if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock($1)`, a); err != nil {
			return err
		}
	}
	for _, s := range p.steps {
		if err := w.step(ctx, tx, s); err != nil {
			return err
		}
	}
	if p.rollback {
		return tx.Rollback(ctx)
	}
	return tx.Commit(ctx)
}

func (w *writer) connected(ctx context.Context) (err error) {
	if w.conn != nil {
		return nil
	}
	if w.conn, err = pgx.Connect(ctx, w.url); err != nil || !w.async {
		return err
	}
	_, err = w.conn.Exec(ctx, `SET synchronous_commit = off`)
	return err
}

const insertSQL = `
WITH counter AS (UPDATE numbers SET n = n + $2::int WHERE aggregate = $1::bigint RETURNING n - $2::int AS n)
INSERT INTO outbox_messages (tenant_id, aggregate_type, aggregate_id, event_type, payload)
SELECT $1::bigint % 3, 'account', $1::bigint, 'account.' || $3::text,
	jsonb_build_object('aggregate', $1::bigint, 'n', counter.n + g, 'fate', $3::text, 'pad', repeat('é', $4::int))
FROM counter, generate_series(1, $2::int) g`

func (w *writer) step(ctx context.Context, tx pgx.Tx, s step) error {
	if s.savepoint == kept {
		_, err := tx.Exec(ctx, insertSQL, s.aggregate, s.rows, kept, s.pad)
		return err
	}
	sub, err := tx.Begin(ctx) // a savepoint
	if err != nil {
		return err
	}
	if _, err := sub.Exec(ctx, insertSQL, s.aggregate, s.rows, s.savepoint, s.pad); err != nil {
		return err
	}
	if s.savepoint == undone {
		return sub.Rollback(ctx)
	}
	return sub.Commit(ctx)
}
