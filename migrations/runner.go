package migrations

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/walpost/walpost/internal/hint"
	"github.com/walpost/walpost/internal/partition"
	"github.com/walpost/walpost/internal/pg"
	"github.com/walpost/walpost/internal/sleep"
	"github.com/walpost/walpost/outbox"
)

const (
	// lockID keeps runners of walpost apart from each other. It spells "walpost".
	lockID int64 = 0x77616c706f7374
	// lockWait is how long a runner waits for another, and lockPause how long between two attempts.
	lockWait, lockPause = time.Minute, 100 * time.Millisecond
	// tableLock is how long a migration waits for a table that somebody uses.
	tableLock = 5 * time.Second
)

// Runner applies the migrations to one database. One goroutine uses it. Several runners, also of several
// processes, may work at the same time: an advisory lock has them take turns, for at most a minute.
type Runner struct {
	// Own says where the tables are made: by default in the first outbox's schema, or public.
	Own pg.Own
	// Owner is given what is made, "" for the one that Own names, or else the connection's own role.
	Owner string
	// SetUp: what is recorded in tables of other roles is not read by a superuser. They count as complete,
	// and further ones are made beside them.
	SetUp bool

	cfg      *pgx.ConnConfig
	conn     *pgx.Conn // nil until it is needed
	outboxes []*outbox.Table
	only     []Group
}

// Applied is a migration that a run applied or took back.
type Applied struct {
	Migration
	Duration time.Duration
}

// State is a migration as the database has it.
type State struct {
	Migration
	// AppliedAt is zero where it was not applied.
	AppliedAt time.Time
}

func (s State) isApplied() bool { return !s.AppliedAt.IsZero() }

func laterApplied(a, b State) int { return a.AppliedAt.Compare(b.AppliedAt) }

// New prepares a runner and does not connect. outbox_messages and outbox_events are made only where one of
// the outboxes is that very table in the canonical layout, or in layout append, the others always. Where
// groups are named, the runner knows the migrations of these and no others: it applies none of the others,
// takes none of them back and lists none.
func New(cfg *pgx.ConnConfig, outboxes []*outbox.Table, only ...Group) *Runner {
	return &Runner{Own: pg.OwnOf("", "", outboxes), cfg: cfg, outboxes: outboxes, only: only}
}

// Close closes the connection.
func (r *Runner) Close() error {
	if r.conn == nil {
		return nil
	}
	return r.conn.Close(context.Background())
}

// connect returns the connection, and the schema of the tables.
func (r *Runner) connect(ctx context.Context) (_ *pgx.Conn, schema string, err error) {
	if r.conn == nil || r.conn.IsClosed() {
		if r.conn, err = pg.ConnectConfig(ctx, r.cfg); err != nil {
			return nil, "", err
		}
	}
	var exists bool
	err = r.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)`, r.Own.Schema).
		Scan(&exists)
	if err == nil && !exists {
		err = hint.Errorf("create the schema, or name another one in postgres.schema",
			"schema %s does not exist: walpost's tables are to be there", r.Own.Schema)
	}
	return r.conn, r.Own.Schema, err
}

// Up applies what is missing up to and including the version of each line, or [Latest], and returns what it
// applied. An error has changed nothing.
func (r *Runner) Up(ctx context.Context, to int64) ([]Applied, error) {
	if to != Latest {
		if err := checkTarget(to, 1, r.only); err != nil {
			return nil, err
		}
	}
	return r.run(ctx, false, func(states []State) []State {
		return slices.DeleteFunc(states, func(s State) bool { return s.isApplied() || s.Version > to })
	})
}

// Down takes back the migrations of each line above the version, or with [OneStep] the one that was applied
// last. It changes nothing where one of the tables still holds undelivered or unexpired rows, or consumers'
// positions.
func (r *Runner) Down(ctx context.Context, to int64) ([]Applied, error) {
	if to != OneStep {
		if err := checkTarget(to, 0, r.only); err != nil {
			return nil, err
		}
	}
	return r.run(ctx, true, func(states []State) []State {
		states = slices.DeleteFunc(states, func(s State) bool { return !s.isApplied() || s.Version <= to })
		slices.Reverse(states)
		if to == OneStep && len(states) > 0 {
			return []State{slices.MaxFunc(states, laterApplied)}
		}
		return states
	})
}

// run applies the migrations that choose chooses, or takes them back, in one transaction.
func (r *Runner) run(
	ctx context.Context, down bool, choose func([]State) []State,
) (done []Applied, err error) {
	err = r.withLock(ctx, func(conn *pgx.Conn, schema string) error {
		states, err := r.states(ctx, conn, schema)
		if err != nil {
			return err
		}
		tables := pg.Polite{Begin: pg.BeginOn(conn), Lock: tableLock, Tries: 1}
		return tables.Do(ctx, func(ctx context.Context, tx pgx.Tx) error {
			b, err := newBeside(ctx, tx, schema, cmp.Or(r.Owner, r.Own.Owner))
			if err != nil {
				return err
			}
			chosen := choose(states)
			for _, s := range chosen {
				if down {
					err = errors.Join(err, r.trusts(ctx, tx, s))
				}
			}
			if err != nil {
				return err
			}
			for _, s := range chosen {
				if _, err := s.file.line.exists(ctx, tx, r.Own, r.SetUp); err != nil {
					return err
				}
				begun := time.Now()
				if err := s.run(ctx, tx, schema, down); err != nil {
					return err
				}
				done = append(done, Applied{Migration: s.Migration, Duration: time.Since(begun)})
			}
			return b.give(ctx, tx)
		})
	})
	if err != nil {
		return nil, explain(err)
	}
	return done, nil
}

// trusts fails where the session does not trust the owners of the tables that a migration takes back: it
// reads them.
func (r *Runner) trusts(ctx context.Context, tx pgx.Tx, s State) error {
	var names []string
	for _, made := range madeInFile.FindAllStringSubmatch(s.file.up, -1) {
		if made[1] == "TABLE" {
			names = append(names, strings.TrimPrefix(made[2], schemaMark))
		}
	}
	_, err := r.Own.Find(ctx, tx.Conn(), names...)
	return err
}

// withLock runs f on the connection, under a lock that keeps other runners out. It tries again and again for
// the lock: a session that waits in a statement has a snapshot, and CREATE INDEX CONCURRENTLY waits for it.
func (r *Runner) withLock(ctx context.Context, f func(*pgx.Conn, string) error) error {
	conn, schema, err := r.connect(ctx)
	if err != nil {
		return err
	}
	for begun, locked := time.Now(), false; !locked; {
		if err := conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, lockID).Scan(&locked); err != nil {
			return fmt.Errorf("take advisory lock: %w", err)
		}
		if !locked && time.Since(begun) > lockWait {
			return hint.Errorf("see pg_locks (locktype advisory) and pg_stat_activity",
				"another `walpost migrate` has held the advisory lock for %s", lockWait)
		}
		if !locked && !sleep.For(ctx, lockPause) {
			return ctx.Err()
		}
	}
	defer func() { // at the latest the end of the session does it
		_, _ = conn.Exec(context.WithoutCancel(ctx), `SELECT pg_advisory_unlock($1)`, lockID)
	}()
	return f(conn, schema)
}

// PartitionByMonth makes partitioned tables of the outboxes: see [partition.ByMonth].
func (r *Runner) PartitionByMonth(ctx context.Context) (done []string, err error) {
	err = r.withLock(ctx, func(conn *pgx.Conn, _ string) (err error) {
		done, err = partition.ByMonth(ctx, conn, r.cfg, r.Own, r.outboxes)
		return err
	})
	return done, explainNotify(err)
}

// Status lists the migrations: what up applies, and what else the database has. It only reads.
func (r *Runner) Status(ctx context.Context) ([]State, error) {
	conn, schema, err := r.connect(ctx)
	if err != nil {
		return nil, explain(err)
	}
	states, err := r.states(ctx, conn, schema)
	return states, explain(err)
}

// states lists the migrations of the lines that are wanted or there, in the order in which up applies them.
func (r *Runner) states(ctx context.Context, conn *pgx.Conn, schema string) (states []State, err error) {
	if err := checkOld(ctx, conn, schema); err != nil {
		return nil, err
	}
	for _, l := range linesOf(r.only) {
		at, err := l.applied(ctx, conn, r.Own, r.SetUp)
		if pg.IsUntrusted(err) && r.SetUp {
			var his bool
			if his, err = r.madeByOwner(ctx, conn, l, err); his {
				at = slices.Repeat([]time.Time{time.Now()}, len(l.steps))
			}
		}
		if err != nil {
			return nil, fmt.Errorf("read which migrations are applied: %w", err)
		}
		if len(at) == 0 && !l.wanted(r.outboxes, schema) {
			continue
		}
		for i, m := range l.steps {
			s := State{Migration: m}
			if i < len(at) {
				s.AppliedAt = at[i]
			}
			states = append(states, s)
		}
	}
	return states, nil
}

// madeByOwner reports whether a version table that a superuser does not read belongs to a role that the
// relay's will trust, or to another relay's: then its tables are there. Else it returns the error.
func (r *Runner) madeByOwner(ctx context.Context, conn *pgx.Conn, l *line, untrusted error) (bool, error) {
	var his bool
	err := conn.QueryRow(ctx, `SELECT `+pg.TrustedSQL("c", "n", "o", "$3", "$4", "$5")+` OR o.rolreplication
		FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_roles o ON o.oid = c.relowner
		WHERE n.nspname = $1 AND c.relname = $2`,
		r.Own.Schema, VersionTable+"_"+l.name, cmp.Or(r.Owner, r.Own.Owner), r.Own.Schemas, r.Own.Names).
		Scan(&his)
	if err == nil && !his || errors.Is(err, pgx.ErrNoRows) {
		err = untrusted
	}
	return his, err
}

// checkOld refuses a database whose tables were made before each group had its own versions.
func checkOld(ctx context.Context, conn *pgx.Conn, schema string) error {
	table := outbox.QuoteIdent(schema) + "." + VersionTable
	var old bool
	err := conn.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, table).Scan(&old)
	if err == nil && old {
		err = hint.Errorf("run `walpost migrate down --to 0` of the build that made the tables, then "+
			"DROP TABLE "+table+", and `walpost migrate up` of this one",
			"the tables are those of a build before the first release: they are in %s", table)
	}
	return err
}
