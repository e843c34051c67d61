package e2e

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

const (
	writers    = 8
	aggregates = 200
)

// load is eight writers who write as fast as they can.
type load struct {
	*rig
	total      int64        // rows that are asked for
	rows       atomic.Int64 // in commits that were answered
	commits    atomic.Int64
	rolledBack atomic.Int64
}

// numbers hold each aggregate's counter: a number is given under the aggregate's
// lock, and a rollback takes it back.
const numbers = `CREATE TABLE numbers (aggregate bigint PRIMARY KEY, n bigint NOT NULL DEFAULT 0) WITH (fillfactor = 50)`

// write returns when so many rows are written, or a little more than that: the
// writers look only before a transaction.
func (r *rig) write(rows int) {
	r.t.Helper()
	r.exec(numbers + fmt.Sprintf(`; INSERT INTO numbers SELECT generate_series(0, %d)`, aggregates-1))
	l := &load{rig: r, total: int64(rows)}
	var all sync.WaitGroup
	for i := range writers {
		w := &writer{load: l, plans: planner{r.random(uint64(i))}, async: i%3 == 0}
		all.Go(func() {
			if err := w.run(r.t.Context()); err != nil {
				r.t.Error(err)
			}
		})
	}
	all.Wait()
	r.t.Logf("load: %d rows in %d commits, %d rollbacks", l.rows.Load(), l.commits.Load(), l.rolledBack.Load())
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

// writer is one session.
type writer struct {
	*load
	plans planner
	async bool
}

func (w *writer) run(ctx context.Context) error {
	conn, err := pgx.Connect(ctx, w.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if w.async {
		if _, err := conn.Exec(ctx, `SET synchronous_commit = off`); err != nil {
			return err
		}
	}
	for w.rows.Load() < w.total {
		p := w.plans.next()
		if err := w.transaction(ctx, conn, p); err != nil {
			return err
		}
		if p.rollback {
			w.rolledBack.Add(1)
			continue
		}
		w.commits.Add(1)
		w.rows.Add(int64(p.rows()))
	}
	return nil
}

func (w *writer) transaction(ctx context.Context, conn *pgx.Conn, p plan) error {
	tx, err := conn.Begin(ctx)
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
